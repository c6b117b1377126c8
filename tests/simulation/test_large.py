"""Nothing dies of being large: what takes minutes counts its progress, and what stops is seen as before.

Replicas and relays use no CPU time here, as a process that waits for a network uses hardly any.
"""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from millrace.config.tables.operation import Supervision
from millrace.config.tables.schedules import Millrace, Synchronous
from millrace.controller.patience import FLOOR_S
from millrace.core.progress import CallProgress, Vitals, count, current, waiting_for
from millrace_sim.costs.interface import Costs
from millrace_sim.explore.invariants import Invariants
from millrace_sim.explore.worlds import small_config
from millrace_sim.roles.sim_replica import SimReplica
from millrace_sim.simulation import Outcome, Scenario, simulate
from millrace_sim.virtual.faults import Faults, Stuck
from millrace_sim.virtual.workers import SimulatedWorker
from tests.long import long

STEP_TIMEOUT_S = 600.0
LOAD_S = 60.0
VERSION_BYTES, LINK_BYTES_S = 10_000_000_000, 5_000_000  # 10 GB over 40 Mbit/s: half an hour


@pytest.fixture(autouse=True)
def no_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = SimulatedWorker._vitals

    def vitals(worker: SimulatedWorker) -> Vitals:
        idle = worker.name.startswith(("replica", "relay"))
        return replace(honest(worker), cpu_s=0.0) if idle else honest(worker)

    monkeypatch.setattr(SimulatedWorker, "_vitals", vitals)


def played(config: object, **scenario: object) -> Outcome:
    made = Scenario(config, **scenario)  # type: ignore[arg-type]
    return simulate(made, Invariants(made))


class Engine:
    """What one thread of a replica executes: a load, during which every command waits. `counts` says so."""

    def __init__(self, *, counts: bool) -> None:
        self.turn, self.progress, self._counts = asyncio.Lock(), CallProgress(), counts

    async def load(self) -> None:
        async with self.turn:
            with self.progress.waiting_for(current()):
                for _ in range(int(LOAD_S)):
                    await asyncio.sleep(1.0)
                    if self._counts:
                        count()


def give_engine(monkeypatch: pytest.MonkeyPatch, *, counts: bool) -> None:
    """Every load of a version takes `LOAD_S`."""
    engines: dict[SimReplica, Engine] = {}
    copy, release, submit = SimReplica._copy, SimReplica.release, SimReplica.submit

    def engine(replica: SimReplica) -> Engine:
        return engines.setdefault(replica, Engine(counts=counts))

    async def slow_copy(replica: SimReplica, *args: object) -> str:
        digest = await copy(replica, *args)  # type: ignore[arg-type]
        await engine(replica).load()
        return digest

    def behind(command):  # type: ignore[no-untyped-def]
        async def wrapped(replica: SimReplica, *args: object) -> object:
            with waiting_for(engine(replica).progress):
                async with engine(replica).turn:
                    return await command(replica, *args)

        return wrapped

    monkeypatch.setattr(SimReplica, "_copy", slow_copy)
    monkeypatch.setattr(SimReplica, "release", behind(release))
    monkeypatch.setattr(SimReplica, "submit", behind(submit))


def test_a_load_of_a_minute_on_the_engines_thread_costs_no_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    give_engine(monkeypatch, counts=True)
    supervision = Supervision(step_timeout_s=STEP_TIMEOUT_S)
    outcome = played(small_config(Synchronous(), steps=3, supervision=supervision), time_max_s=2000.0)
    assert outcome.restarts == 0 and len(outcome.of("pulled")) >= 3
    assert outcome.wall_s > 3 * LOAD_S


def test_a_load_that_does_nothing_is_seen_within_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    give_engine(monkeypatch, counts=False)
    supervision = Supervision(step_timeout_s=STEP_TIMEOUT_S, restarts=0)
    config = small_config(Synchronous(), steps=3, supervision=supervision)
    with pytest.raises(Exception, match=r"pull was asked for 2\d s ago"):
        played(config, time_max_s=2000.0)


@long
def test_ten_gigabytes_over_a_slow_link_arrive_and_cost_no_relay() -> None:
    fetch_s = VERSION_BYTES / LINK_BYTES_S
    costs = Costs(fetch_s=fetch_s, weights_bytes=VERSION_BYTES, step_base_s=550.0)
    supervision = Supervision(step_timeout_s=STEP_TIMEOUT_S)
    config = small_config(Millrace(staleness_max=4), steps=6, supervision=supervision)
    outcome = played(config, hosts=2, costs=costs, time_max_s=20 * fetch_s)
    assert [e["name"] for e in outcome.of("worker_died") if e["role"] == "relay"] == []
    assert outcome.of("fetched") and all(e["fetch_s"] > STEP_TIMEOUT_S for e in outcome.of("fetched"))


def test_a_relay_that_gets_nothing_any_more_in_the_middle_of_a_version_is_replaced_in_time() -> None:
    costs = Costs(fetch_s=1000.0, weights_bytes=VERSION_BYTES, step_base_s=50.0)
    supervision = Supervision(step_timeout_s=STEP_TIMEOUT_S)
    config = small_config(Millrace(staleness_max=4), steps=4, supervision=supervision)
    faults = Faults(stuck=(Stuck("relay-host-1", 100.0),))
    outcome = played(config, hosts=2, costs=costs, faults=faults, time_max_s=5000.0)
    (death,) = outcome.of("worker_died")
    assert death["role"] == "relay" and "fetch was asked for" in death["cause"]
    when_s = next(event.time_s for event in outcome.events if event.kind == "worker_died")
    assert when_s < 100.0 + FLOOR_S + 10.0
