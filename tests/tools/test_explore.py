"""Seeded worlds in which everything goes wrong, and how the explorer tells of them.

Every bug planted by `test_mutations` is found among fewer. `millrace simulate --chaos 10000` tries more."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.long import few, long

from millrace.config.tables.schedules import Laminar
from millrace.config.tables.training import BatchShape
from millrace.controller.state.run_state import RunState
from millrace_sim.explore.verdicts import explore, try_seed
from millrace_sim.explore.worlds import random_world, small_config

SEEDS, CHUNK = 300, 20
HARD = range(13, 21)  # between them: every kind of fault
PROGRAM = (
    "from millrace_sim.explore.verdicts import try_seed; print(*(try_seed(i).digest for i in range(13, 21)))"
)


@pytest.mark.parametrize("first", few(range(0, SEEDS, CHUNK)))
def test_no_storm_breaks_a_promise(first: int) -> None:
    report = explore(first, CHUNK)
    assert report.ok, "\n".join(f"{v.command}: {v.schedule}: {v.problem}" for v in report.failures)


@long
def test_the_same_seed_takes_the_same_path_in_every_process_under_every_fault() -> None:
    here = " ".join(try_seed(seed).digest for seed in HARD)
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == here
    assert len(set(here.split())) == len(HARD)


def test_the_worlds_hold_every_kind_of_fault() -> None:
    worlds = [random_world(seed).faults for seed in HARD]
    for kind in (
        "failures",
        "slow",
        "partitions",
        "mishaps",
        "clock_jumps",
        "controller_crashes",
        "crashes",
        "poisonous",
    ):
        assert any(getattr(faults, kind) for faults in worlds), kind
    rewards = [random_world(seed).workload for seed in HARD]
    assert any(work.unanswered_fraction for work in rewards) and any(
        work.starved_fraction for work in rewards
    )


@long
def test_processes_share_the_seeds_and_report_them_in_order() -> None:
    seeds: list[int] = []
    shared = explore(0, 6, jobs=2, on_seed=lambda verdict: seeds.append(verdict.seed))
    assert shared == explore(0, 6)
    assert seeds == list(range(6))


def test_a_failing_seed_says_how_it_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunState, "restart", lambda state, trajectory: 1 // 0)
    monkeypatch.setattr(RunState, "_settle_group", lambda state, group_id: 1 // 0)
    report = explore(5, 1, command="millrace simulate run.toml")
    assert not report.ok
    assert report.failures[0].command == "millrace simulate run.toml --chaos 1 --seed 5"
    assert "ZeroDivisionError" in report.failures[0].problem


def test_a_users_own_run_is_explored_shortened_and_with_its_own_shape() -> None:
    config = small_config(Laminar(), steps=500, batch=BatchShape(prompts=4, group_size=2))
    scenario = random_world(3, config)
    assert (scenario.config.steps, scenario.config.batch) == (12, config.batch)
    assert explore(0, 3, config=config).ok
