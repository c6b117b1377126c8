"""What a run is told of settings that waste a GPU."""

from __future__ import annotations

from placement_needs import GB, ON_CPU, ON_GPU

from millrace.config.schema import Config
from millrace.core.placement import Gpu, Host
from millrace.placement.assign import assign
from millrace.placement.describe import gpu_advice

BATCH = {"prompts": 32, "group_size": 8}


def advice(*, gpus: int = 2, dtype: str = "bfloat16", slots: int = 256, **rollout: object) -> list[str]:
    config = Config.model_validate(
        {
            "model": {"path": "m", "dtype": dtype},
            "task": {"kind": "gym", "name": "gcd"},
            "reward": {"kind": "gym"},
            "rollout": {"replicas": 1, "slots": slots, "max_sequence_tokens": 2048, **rollout},
            "batch": BATCH,
        }
    )
    host = Host(
        "played", 16, 500 * GB, 500 * GB, tuple(Gpu(i, "H100", 80 * GB, 80 * GB) for i in range(gpus))
    )
    return list(gpu_advice(assign(config, host, ON_GPU if gpus else ON_CPU), config))


def test_float32_on_a_gpu_is_named_with_what_it_costs() -> None:
    (message,) = advice(dtype="float32")
    assert "15 times as long" in message
    assert "TF32 is off" in message
    assert "1.0 GB" in message and "6.3 GB" in message  # a version; 256 x 2,048 x 12 kB


def test_a_gpu_with_room_for_more_slots_is_named_if_trajectories_wait() -> None:
    (message,) = advice(slots=32)
    assert "raise it to 256" in message  # of the 32 x 8 trajectories of a step
    assert advice(slots=200) == []


def test_engines_that_divide_their_memory_themselves_get_no_advice_on_slots() -> None:
    assert advice(slots=32, engine="vllm") == []


def test_on_a_cpu_nothing_is_told() -> None:
    assert advice(gpus=0, dtype="float32", slots=32) == []
