"""What `benchmarks/published/robustrl.py` counts as effective training time."""

from __future__ import annotations

from typing import Any

import pytest
from published.robustrl import BYTEROBUST, Size, System, Watch, injected, run

from millrace.core.events import Event
from millrace_sim.virtual.faults import Faults, Strike

SIZE = Size(machines=2, steps=20)  # eight devices train, and eight generate


def watched(*events: tuple[float, str, dict[str, Any]], crash_s: float | None = None) -> Watch:
    watch = Watch(SIZE, quantum=1)
    for time_s, kind, fields in events:
        if crash_s is not None and time_s > crash_s:
            watch.on_crash()
            crash_s = None
        watch.on_event(Event(kind, time_s, time_s, fields))
    watch.on_end(None, None)
    return watch


def step(version: int, step_s: float, wait_s: float = 0.0, *, replayed: bool = False) -> dict[str, Any]:
    return {
        "version": version,
        "step_s": step_s,
        "wait_s": wait_s,
        "replayed": replayed,
        "trained_tokens": 100,
    }


def test_a_trainer_that_is_absent_costs_its_share_of_the_devices() -> None:
    watch = watched(
        (100.0, "step", step(1, 10.0)),
        (110.0, "worker_died", {"name": "trainer"}),
        (150.0, "step", step(1, 10.0, replayed=True)),
        (200.0, "step", step(2, 20.0, 10.0)),
    )
    measured = watch.measured
    assert measured.wall_s == 100.0
    assert measured.recovery_s == {"trainer": [60.0]}  # until 200 - 20 - 10
    assert measured.ettr == pytest.approx(1 - 60 / 100 / 2)
    assert (measured.again, measured.deaths, measured.trained) == (1, 1, 200)


def test_a_stall_of_the_trainer_and_an_absent_replica_cost_their_devices() -> None:
    watch = watched(
        (0.0, "step", step(1, 10.0)),
        (10.0, "checkpoint", {"stall_s": 4.0}),
        (20.0, "worker_died", {"name": "replica-0"}),
        (50.0, "pulled", {"replica": "replica-0"}),
        (100.0, "step", step(2, 10.0)),
    )
    assert watch.measured.ettr == pytest.approx(1 - (4 + 30) / 100 / 2)


def test_a_job_that_restarts_whole_has_no_effective_device() -> None:
    watch = watched(
        (0.0, "step", step(1, 10.0)),
        (20.0, "report", {"replica": "replica-0", "generated_tokens": 5}),
        (60.0, "pulled", {"replica": "replica-0"}),
        (100.0, "step", step(2, 40.0)),
        crash_s=30.0,
    )
    assert watch.measured.ettr == pytest.approx(1 - 40 / 100)  # absent since the last sign of life, at 20
    assert watch.measured.deaths == 1


TINY = Size(machines=2, prompts=2, group_size=2, steps=4, median=300.0, p99=600.0, max_tokens=1000)


def test_a_simulated_death_of_the_trainer_costs_what_its_restart_takes() -> None:
    one = run(TINY, System(), Faults(strikes=(Strike("trainer", 2),)))
    (recovery_s,) = one.recovery_s["trainer"]
    assert 173.0 <= recovery_s < 180.0
    assert one.ettr == pytest.approx(1 - (recovery_s + one.stalled_s) / one.wall_s / 2)
    assert one.deaths == 1


def test_a_whole_job_without_a_checkpoint_begins_anew() -> None:
    one = run(TINY, BYTEROBUST, Faults(strikes=(Strike("controller", 3),)))
    assert (one.deaths, one.again) == (1, 3)
    assert one.recovery_s["trainer"] == [pytest.approx(277.8, abs=1.0)]
    assert one.generated > 1.5 * one.trained


def test_every_system_meets_the_same_faults() -> None:
    alone, whole = (injected(Size(), "trainer", 40.0, whole_job=both, seed=1) for both in (False, True))
    assert len(alone.strikes) == 10
    assert [one.version // 10 for one in alone.strikes] == list(range(10))
    assert [(one.version, one.after_s) for one in alone.strikes] == [
        (one.version, one.after_s) for one in whole.strikes
    ]
