"""How many threads each worker gets, on hosts with few and many cores."""

from __future__ import annotations

from dataclasses import replace

import pytest
from placement_needs import GB, ON_CPU, ON_GPU

from millrace.config.schema import Config
from millrace.core.placement import Gpu, Host
from millrace.placement.assign import assign
from millrace.placement.thread_plan import ROW_OPERATIONS, divided, row_full, row_tokens, tokens_at_once


def host(cores: int, *, threads: int = 0, gpus: tuple[Gpu, ...] = ()) -> Host:
    return Host("played", cores, 500 * GB, 500 * GB, gpus, threads=threads)


def config_for(replicas: int = 1, **sections: object) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "task": {"kind": "gym", "name": "gcd"},
            "reward": {"kind": "gym"},
            "rollout": {"replicas": replicas},
            **sections,
        }
    )


def threads_of(host: Host, parameters: int, config: Config | None = None) -> tuple[int | None, ...]:
    """Of the trainer, then of each replica."""
    needs = replace(ON_GPU if host.gpus else ON_CPU, num_parameters=parameters)
    placement = assign(config or config_for(), host, needs)
    return tuple(place.threads for place in (placement.trainer, *placement.replicas))


def test_a_small_model_has_one_thread_a_worker() -> None:
    assert threads_of(host(16), 800_000) == (1, 1)


def test_the_trainer_of_a_larger_model_has_all_cores_and_a_replica_its_share() -> None:
    assert threads_of(host(2), 30_000_000) == (2, 1)
    assert threads_of(host(8), 30_000_000) == (7, 3)  # seven rows fit in one micro-batch
    assert threads_of(host(8), 30_000_000, config_for(replicas=2)) == (7, 2, 2)
    assert threads_of(host(1), 30_000_000) == (1, 1)


def test_the_environment_s_number_wins() -> None:
    assert threads_of(host(16, threads=3), 800_000) == (3, 3)
    assert threads_of(host(2, threads=1), 30_000_000) == (1, 1)


def test_ranks_have_one_thread_each() -> None:
    assert threads_of(host(8), 30_000_000, config_for(trainer={"shard": 2}))[0] == 1


def test_on_a_gpu_the_environment_decides() -> None:
    assert threads_of(host(8, gpus=(Gpu(0, "H100", 80 * GB, 80 * GB),)), 30_000_000) == (None, None)


@pytest.mark.parametrize(
    ("threads", "cut", "expected"),
    [(1, True, (1, 1)), (4, True, (4, 1)), (32, True, (8, 4)), (4, False, (1, 4)), (12, True, (8, 1))],
)
def test_rows_come_before_threads_of_a_row(threads: int, cut: bool, expected: tuple[int, int]) -> None:
    assert divided(threads, cut=cut) == expected


def test_a_row_has_the_same_tokens_whatever_the_threads() -> None:
    assert row_tokens(30_000_000, 8192) == int(ROW_OPERATIONS / 1.8e8)
    assert row_tokens(7_000_000_000, 8192) == 512
    assert row_tokens(800_000, 8192) == 8192


def test_rows_of_several_trees_are_shorter_for_a_large_model() -> None:
    """A tree is cut at `row_tokens` only, because each part repeats its prompt."""
    assert row_full(135_000_000, 8192, narrow=False) == 256
    assert row_full(135_000_000, 8192, narrow=True) == row_tokens(135_000_000, 8192) == 512
    assert row_full(30_000_000, 8192, narrow=False) == row_tokens(30_000_000, 8192)
    assert row_full(135_000_000, 100, narrow=False) == row_tokens(135_000_000, 100) == 100


def test_no_more_tokens_are_computed_at_once_than_the_largest_tree_has() -> None:
    def at_once(max_tokens: int, longest: int) -> int:
        rollout, sampling = {"max_sequence_tokens": longest}, {"max_tokens": max_tokens}
        config = config_for(rollout=rollout, sampling=sampling, batch={"group_size": 8})
        return tokens_at_once(config, 2, 135_000_000)

    assert at_once(40, 160) == 2 * (160 + 7 * 40)
    assert at_once(2, 40) == 2 * 256
    assert at_once(400, 800) == 2 * 800
