"""Each engine says what memory a replica keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from placement_needs import ON_GPU
from sparse_models import SHAPES, sparse_model

from millrace.config.schema import Config
from millrace.core.errors import ConfigError
from millrace.core.placement import Gpu, Host
from millrace.placement.assign import TIGHT, Placement, assign
from millrace.placement.describe import table
from millrace.placement.memory.engine_memory import MemoryNeed, ServedModel, own_engine, server, vllm
from millrace.placement.memory.needs import read_needs
from millrace.rollout.engine_kinds import ENGINES

GB = 10**9
SERVED = ServedModel(
    weights_bytes=1000,
    version_bytes=500,
    largest_bytes=50,
    kv_token_bytes=2,
    slots=4,
    max_sequence_tokens=100,
    num_devices=2,
    on_gpu=True,
    converts=False,
    packed_bytes=0,
)


def test_the_own_engine_keeps_its_versions_and_the_longest_sequence_in_every_slot() -> None:
    assert own_engine(SERVED) == MemoryNeed((2 * 1000 + 4 * 200) // 2, 50)
    on_cpu = replace(SERVED, on_gpu=False, packed_bytes=1000)
    assert own_engine(on_cpu) == MemoryNeed(0, 3800)
    assert own_engine(replace(on_cpu, converts=True)) == MemoryNeed(0, 3800 + 500 + 50)


def test_vllm_needs_pages_for_one_sequence_and_can_use_pages_for_every_slot() -> None:
    assert vllm(SERVED) == MemoryNeed((1000 + 50 + 200) // 2, 0, 3 * 200 // 2)
    assert vllm(replace(SERVED, on_gpu=False)) == MemoryNeed(0, 1000 + 50 + 5 * 200)


def test_a_server_keeps_nothing_here() -> None:
    assert server(SERVED) == MemoryNeed(0, 0)


def node(gpus: int, gb: int = 80) -> Host:
    return Host(
        "node", 96, 1000 * GB, 1000 * GB, tuple(Gpu(i, "H100", gb * GB, gb * GB) for i in range(gpus))
    )


def placed(path: Path, host: Host, engine: str, **sections: dict[str, object]) -> Placement:
    """A 7B model with 256 slots of 32k tokens."""
    rollout = {"engine": engine, "slots": 256, "max_sequence_tokens": 32_768, "replicas": 4}
    if engine == "server":
        rollout = {"servers": [f"http://h:{i}" for i in range(4)], **{k: rollout[k] for k in ("slots",)}}
    config = Config.model_validate(
        {
            "model": {"path": str(path), "dtype": "bfloat16", "recompute": True},
            "task": {"kind": "gym", "name": "gcd"},
            "reward": {"kind": "gym"},
            "rollout": rollout,
            "trainer": {"shard": 4},
            **sections,
        }
    )
    memory = ENGINES[config.rollout.engine].memory
    return assign(config, host, read_needs(config, on_gpu=True, replica_memory=memory))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sparse_model(tmp_path_factory.mktemp("7b"), SHAPES["7b"])


def test_a_quantised_replica_keeps_a_byte_for_each_number_of_a_layers_matrix(large: Path) -> None:
    plain, rounded = (
        placed(large, node(8), "vllm", rollout={"engine": "vllm", "quantization": quantization}).needs.replica
        for quantization in (None, "fp8")
    )
    numbers = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18_944)
    rows = 28 * (2 * 3584 + 2 * 512 + 2 * 18_944 + 3584)
    assert plain.device_bytes - rounded.device_bytes == numbers - 4 * rows


def test_vllm_runs_256_slots_of_32k_tokens_that_the_own_engine_has_no_room_for(large: Path) -> None:
    placement = placed(large, node(8), "vllm")
    need = placement.needs.replica
    assert need.device_bytes == pytest.approx(18.2 * GB, rel=0.02)
    assert need.cache_bytes == pytest.approx(255 * 32_768 * 57_344)
    assert table(placement)["a replica's cache"] == (
        "what is left of its GPUs; 479.2 GB would hold every slot"
    )
    with pytest.raises(ConfigError, match=r"(?s)replica-0 keeps 511.* 26 slots would fit"):
        placed(large, node(8), "own")
    assert placed(large, node(4), "server").needs.replica == MemoryNeed(0, 0)


def test_a_server_needs_nothing_for_a_step_either(large: Path) -> None:
    assert placed(large, node(4), "server").needs.activation_memory.replica_bytes == 0


def test_beside_a_trainer_vllm_gets_a_cache_of_what_the_trainer_leaves() -> None:
    config = Config.model_validate(
        {
            "model": {"path": "m"},
            "task": {"kind": "gym", "name": "gcd"},
            "reward": {"kind": "gym"},
            "rollout": {"replicas": 2},
        }
    )
    one = Host("h", 16, 100 * GB, 100 * GB, (Gpu(0, "H100", 80 * GB, 80 * GB),))

    def shares(cache_bytes: int) -> list[float]:
        needs = replace(ON_GPU, replica=replace(ON_GPU.replica, cache_bytes=cache_bytes))
        placement = assign(config, one, needs)
        return [placement.trainer.share, *(place.share for place in placement.replicas)]

    none, some, much = shares(0), shares(10 * GB), shares(10**12)
    assert some[1] == some[2] == pytest.approx(none[1] + 10 / 80)
    assert much[0] == pytest.approx((8 + 0.5) / 80 / TIGHT)
    assert sum(much) == pytest.approx(1)


def test_a_sparse_model_has_the_parameters_of_its_shape(large: Path) -> None:
    assert json.loads((large / "config.json").read_text())["num_hidden_layers"] == 28
