"""Adapters that vLLM computes beside the base weights: what is refused, and what the engine is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from placement_needs import ON_CPU
from pydantic import ValidationError
from safetensors.numpy import save_file

from millrace.config.goes_together import RANK_MAX
from millrace.config.schema import Config
from millrace.core.errors import ConfigError
from millrace.core.placement import Host
from millrace.placement.assign import assign
from millrace.placement.memory.engine_memory import SLOT_RANKS, MemoryNeed, slot_rank, vllm
from millrace.placement.memory.needs import read_needs
from millrace.rollout.engine_kinds import refuse_unable
from millrace.rollout.protocol import NativeAdapter
from millrace.run.compose import engine_options
from millrace.run_directory.run_directory import RunDirectory

GB = 10**9


def config_of(path: Path | str = "m", *, native: bool = True, **sections: dict[str, Any]) -> Config:
    rollout = {"engine": "vllm", "native_adapters": native, "replicas": 1} | sections.pop("rollout", {})
    return Config.model_validate(
        {
            "model": {"path": str(path)},
            "task": {"kind": "gym", "name": "gcd"},
            "reward": {"kind": "gym"},
            "schedule": {"kind": "synchronous"},
            "adapter": {"rank": 20},
            "rollout": rollout,
            **sections,
        }
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"adapter": {}},
            r"`rollout.native_adapters` \(true\) needs an adapter",
        ),
        ({"adapter": {"rank": RANK_MAX + 1}}, "has ranks up to 512, and `adapter.rank` is 513"),
        ({"adapter": {"rank": 4, "kind": "dora"}}, "has no DoRA magnitudes"),
        ({"rollout": {"tensor": 2}}, r"has one device, and `rollout.tensor` is 2"),
        ({"rollout": {"colocated": True}}, "with `rollout.colocated`"),
        ({"rollout": {"quantization": "fp8"}}, '`rollout.quantization` is "fp8"'),
    ],
)
def test_what_vllm_cannot_do_beside_the_weights_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config_of(**changes)


def test_other_engines_refuse_them_by_name() -> None:
    refuse_unable(config_of())
    for rollout in ({"engine": "own"}, {"engine": "server", "servers": ["http://a"]}):
        with pytest.raises(ConfigError, match=r"cannot do `rollout.native_adapters` \(True\)"):
            refuse_unable(config_of(rollout=rollout))


def test_a_slot_is_the_smallest_that_holds_the_rank() -> None:
    assert SLOT_RANKS[-1] == RANK_MAX
    assert [slot_rank(rank) for rank in (1, 2, 8, 9, 300, RANK_MAX)] == [1, 8, 8, 16, 320, RANK_MAX]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two matrices of a layer, and an embedding, which gets no adapter."""
    shapes = {"layers.0.up_proj": (20, 10), "layers.0.down_proj": (10, 20), "embed_tokens": (30, 10)}
    tensors = {f"model.{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 10}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    return tmp_path


def test_the_engine_gets_the_adapter_and_the_replica_merges_nothing(model: Path, tmp_path: Path) -> None:
    placed = assign(config_of(), Host("h", 8, 100 * GB, 100 * GB, ()), ON_CPU)
    options = engine_options(config_of(model), RunDirectory(tmp_path), placed)
    assert options.adapter_scale is None
    assert options.native_adapter == NativeAdapter(20, 32 / 20, ("down_proj", "up_proj"))
    merged = engine_options(config_of(model, native=False), RunDirectory(tmp_path), placed)
    assert merged.native_adapter is None and merged.adapter_scale == 32 / 20


def test_a_replica_keeps_the_slot_and_the_adapter_on_the_host(model: Path) -> None:
    def need(*, native: bool, on_gpu: bool) -> MemoryNeed:
        return read_needs(config_of(model, native=native), on_gpu=on_gpu, replica_memory=vllm).replica

    slot = 4 * 32 * (20 + 10) * 2
    for on_gpu in (False, True):
        merged, native = (need(native=native, on_gpu=on_gpu) for native in (False, True))
        more = {"device_bytes": merged.device_bytes + slot} if on_gpu else {}
        host = merged.host_bytes + (slot if on_gpu else 2 * slot)
        assert native == replace(merged, host_bytes=host, **more)
