"""Runs over several simulated hosts: what must hold, and what a chain costs."""

from __future__ import annotations

import asyncio

import pytest

from millrace.config.schedules import AReaL, Laminar, LlamaRL, Millrace, Schedule, Synchronous
from millrace.config.training import BatchShape
from millrace.core.types import Endpoint, Staged
from millrace.schedule.view import ReplicaView, View
from millrace.sim.costs.interface import Costs
from millrace.sim.explore.invariants import InvariantBroken, Invariants
from millrace.sim.explore.worlds import small_config
from millrace.sim.roles.sim_relay import SimRelay
from millrace.sim.roles.world import World
from millrace.sim.simulation import Outcome, Scenario, simulate
from millrace.sim.virtual import loop
from millrace.sim.virtual.faults import Failures, Faults, Partitions

SCHEDULES: tuple[Schedule, ...] = (
    Synchronous(),
    LlamaRL(lag=2),
    AReaL(eta=2),
    Laminar(repack_interval_s=0.5),
    Millrace(repack_interval_s=0.5),
)
HOSTS = ("localhost", "host-1", "host-2")


def played(
    schedule: Schedule, *, hosts: int = 3, seed: int = 0, faults: Faults = Faults(), costs: Costs = Costs()
) -> Outcome:
    config = small_config(schedule, batch=BatchShape(prompts=6, group_size=3))
    scenario = Scenario(config, seed=seed, faults=faults, hosts=hosts, costs=costs)
    return simulate(scenario, Invariants(scenario))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.kind)
def test_every_host_gets_the_versions_and_serves(schedule: Schedule) -> None:
    outcome = played(schedule)
    assert {e["host"] for e in outcome.of("fetched")} == set(HOSTS[1:])
    versions = [e["version"] for e in outcome.of("pulled") if e["replica"] == "replica-2"]
    assert versions[0] == 0 and len(versions) > 1
    assert {e["replica"] for e in outcome.of("leased")} == {"replica-0", "replica-1", "replica-2"}


def test_the_barrier_of_a_synchronous_run_leaves_every_host_its_share() -> None:
    outcome = played(Synchronous(), costs=Costs(fetch_s=1.0))
    shares = [e["replica"] for e in outcome.of("leased") if e["version"] >= 1]
    assert {shares.count(f"replica-{i}") > 0 for i in range(3)} == {True}


def test_a_synchronous_run_trains_the_same_on_one_host_and_on_three() -> None:
    def trained(outcome: Outcome) -> list[float]:
        return [e["reward_mean"] for e in outcome.of("step")]

    assert trained(played(Synchronous(), hosts=1)) == trained(played(Synchronous()))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.kind)
@pytest.mark.parametrize("seed", range(4))
def test_relays_that_die_again_and_again_stop_no_run(schedule: Schedule, seed: int) -> None:
    outcome = played(schedule, seed=seed, faults=Faults(failures=(Failures("relay*", 1.0),)))
    assert any(e["role"] == "relay" for e in outcome.of("worker_died"))


def test_relays_that_are_cut_off_stop_no_run() -> None:
    for seed in range(8):
        cuts = (Partitions("relay-host*", 2.0, (0.5, 30.0)),)
        played(Millrace(), seed=seed, faults=Faults(partitions=cuts))


def test_a_relay_that_never_comes_back_leaves_its_host_serving_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = SimRelay.fetch

    async def fetch(relay: SimRelay, version: int, digest: str, sources: list[str]) -> Staged:
        if version >= 2 and "host-1" in relay._address:
            sources = []
        return await honest(relay, version, digest, sources)

    monkeypatch.setattr(SimRelay, "fetch", fetch)
    for schedule in SCHEDULES:
        outcome = played(schedule)
        assert {e["host"] for e in outcome.of("fetch_missed")} == {"host-1"}
        pulled = [e["version"] for e in outcome.of("pulled") if e["replica"] == "replica-1"]
        assert max(pulled) == 1


def test_a_decision_that_sees_what_other_hosts_hold_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(View, "held_by", lambda view, replica: view.held)

    def newest_for(view: View, replica: ReplicaView) -> int:
        return view.newest

    monkeypatch.setattr(View, "newest_for", newest_for)
    with pytest.raises(InvariantBroken, match="a replica pulls what its host holds"):
        played(AReaL(eta=2))


def chained(num: int, *, hop_s: float = 0.01) -> list[float]:
    """When each relay of a chain has a version that all are told to fetch at once."""

    async def run() -> list[float]:
        world, costs = World(), Costs(fetch_s=1.0, hop_s=hop_s, stage_s=0.0)
        relays = [SimRelay(world, slots=2, costs=costs, address=f"host-{i}") for i in range(num + 1)]
        opened: list[Endpoint] = [await relay.open(8) for relay in relays]
        world.shelf(opened[0].path).write(4, "digest")
        await relays[0].stage(4, "digest")
        began_s = asyncio.get_running_loop().time()

        async def fetch(place: int) -> float:
            sources = [endpoint.address for endpoint in opened[:place][::-1]]
            staged = await relays[place].fetch(4, "digest", sources)
            assert staged.source == opened[place - 1].address
            return asyncio.get_running_loop().time() - began_s

        return list(await asyncio.gather(*(fetch(place) for place in range(1, num + 1))))

    return loop.run(run(), seed=0, time_max_s=100.0)


def test_a_chain_takes_hardly_longer_than_one_hop() -> None:
    assert chained(4) == pytest.approx([1.0, 1.01, 1.02, 1.03])
