"""Who runs where if trainer and replicas use one device in turns."""

from __future__ import annotations

from dataclasses import replace

import pytest
from placement_needs import GB, ON_CPU, ON_GPU

from millrace.config.schema import Config
from millrace.core.errors import ConfigError
from millrace.core.placement import Gpu, Host
from millrace.placement.assign import Placement, assign
from millrace.placement.describe import warnings
from millrace.placement.memory.engine_memory import CONTEXT_BYTES
from millrace.placement.memory.needs import MemoryNeed


def host(gpus: int, *, gpu_gb: int = 80, gb: int = 200) -> Host:
    listed = tuple(Gpu(i, "H100", gpu_gb * GB, gpu_gb * GB) for i in range(gpus))
    return Host("played", 16, gb * GB, gb * GB, listed)


def config_for(replicas: int, *, colocated: bool = True, **sections: object) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "task": {"kind": "gym", "name": "gcd"},
            "reward": {"kind": "gym"},
            "schedule": {"kind": "synchronous"},
            "rollout": {"replicas": replicas, "colocated": colocated},
            **sections,
        }
    )


def devices(placement: Placement) -> list[tuple[int, ...] | None]:
    return [place.devices for place in (placement.trainer, *placement.replicas)]


def test_replicas_have_the_gpus_of_the_trainer() -> None:
    assert devices(assign(config_for(1), host(1), ON_GPU)) == [(0,), (0,)]
    sharded = config_for(4, trainer={"shard": 4})
    assert devices(assign(sharded, host(4), ON_GPU)) == [(0, 1, 2, 3), (0,), (1,), (2,), (3,)]


def test_each_side_has_the_whole_gpu_in_its_turn_but_for_contexts() -> None:
    placement = assign(config_for(2), host(1), ON_GPU)
    context = CONTEXT_BYTES / (80 * GB)
    assert placement.trainer.share == pytest.approx(1 - 2 * context)
    assert [place.share for place in placement.replicas] == pytest.approx([(1 - context) / 2] * 2)


def test_what_fits_alone_fits_in_turns_and_not_at_once() -> None:
    large = replace(ON_GPU, trainer=MemoryNeed(60 * GB, 0), replica=MemoryNeed(60 * GB, 0))
    with pytest.raises(ConfigError):
        assign(config_for(1, colocated=False), host(1), large)
    placement = assign(config_for(1), host(1), large)
    assert not [warning for warning in warnings(placement, config_for(1)) if "another process" in warning]


def test_a_trainer_that_sleeps_on_a_gpu_has_room_on_the_host() -> None:
    needs = replace(ON_GPU, trainer=MemoryNeed(60 * GB, 0), weights_bytes=GB)
    with pytest.raises(ConfigError, match="the host has"):
        assign(config_for(1), host(1, gb=40), needs)


def test_too_few_gpus_for_one_side_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"`rollout\.colocated`"):
        assign(config_for(1, trainer={"shard": 4}), host(2), ON_GPU)


def test_on_a_cpu_replicas_share_all_cores() -> None:
    large = replace(ON_CPU, num_parameters=1_000_000_000)
    together = assign(config_for(2), host(0), large)
    apart = assign(config_for(2, colocated=False), host(0), large)
    assert [place.threads for place in together.replicas] == [8, 8]
    assert [place.threads for place in apart.replicas] == [3, 3]
