"""Moves that overlap, under the real controller."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from millrace.config.schema import Config
from millrace.config.tables.schedules import FunctionSchedule, Laminar
from millrace.schedule import RepackOrder, Schedule, View, presets
from millrace_sim.costs.workload import LogNormal, Workload
from millrace_sim.explore.invariants import Invariants
from millrace_sim.explore.worlds import crowded, small_config
from millrace_sim.simulation import Scenario, simulate
from millrace_sim.virtual.faults import Faults, Lag
from tests.long import few


@dataclass(frozen=True)
class Gather:
    """Whenever three replicas under one version have work, the first gets it all."""

    interval_s: float = 0.2

    def moves(self, view: View) -> list[RepackOrder]:
        at_work = [replica for replica in view.replicas if replica.serving and replica.load]
        if len(at_work) < 3 or len({replica.version for replica in at_work}) > 1:
            return []
        first = at_work[0].replica_id
        return [RepackOrder(replica.replica_id, {first: replica.load}) for replica in at_work[1:]]

    def describe(self) -> str:
        return "everything to the first"


def gather(config: Config) -> Schedule:
    return replace(presets.build(config.model_copy(update={"schedule": Laminar()})), repack_rule=Gather())


@pytest.mark.parametrize(("length", "lag_s", "seed"), few([(40.0, 0.4, 6), (60.0, 0.5, 8)]))
def test_who_still_waits_for_a_slow_source_takes_no_other_version_meanwhile(
    length: float, lag_s: float, seed: int
) -> None:
    """What came from the other sources has ended, and newer weights are there, before its own arrives."""
    schedule = FunctionSchedule(path=f"{__file__}:gather")
    scenario = Scenario(
        crowded(small_config(schedule, steps=36, replicas=4, seed=seed)),
        seed=seed,
        faults=Faults(lags=(Lag("replica-1", extra_s=lag_s),)),
        workload=Workload(completion=LogNormal(length, 0.5)),
    )
    outcome = simulate(scenario, Invariants(scenario))
    assert len(outcome.of("moved")) > 50
