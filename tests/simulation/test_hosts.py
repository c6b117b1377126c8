"""Runs over several simulated hosts: what must hold, and what a chain costs."""

from __future__ import annotations

import asyncio

import pytest

from millrace.config.tables.operation import Supervision
from millrace.config.tables.schedules import AReaL, Laminar, LlamaRL, Millrace, Schedule, Synchronous
from millrace.config.tables.training import BatchShape
from millrace.core import clock
from millrace.core.errors import HostLost, WeightsError, WorkerError
from millrace.core.placement import HERE, Place
from millrace.core.types import Endpoint, Staged
from millrace.schedule.view import ReplicaView, View
from millrace_sim.costs.interface import Costs
from millrace_sim.explore.invariants import InvariantBroken, Invariants
from millrace_sim.explore.worlds import small_config
from millrace_sim.roles.sim_relay import SimRelay
from millrace_sim.roles.world import World
from millrace_sim.simulation import Outcome, Scaling, Scenario, simulate
from millrace_sim.virtual import loop
from millrace_sim.virtual.faults import Crash, Failures, Faults, Partitions
from millrace_sim.virtual.sim_runtime import SimHandle, SimRuntime
from tests.long import few, long

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


@long
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
    monkeypatch.setattr(View, "pullable_by", lambda view, replica: view.pullable)

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
        world.slots_at(opened[0].path).write(4, "digest")
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


# ---------------------------------------------------------------- hosts that come and go


def growing(
    *scalings: tuple[float, int],
    schedule: Schedule = Millrace(),
    replicas: int = 1,
    steps: int = 16,
    hosts: int = 1,
    later_hosts: int = 2,
    faults: Faults = Faults(),
    **sections: object,
) -> Outcome:
    """From one host, if nothing else is said, to three."""
    config = small_config(schedule, steps=steps, replicas=replicas, **sections)
    scenario = Scenario(
        config,
        costs=Costs(step_base_s=0.2),
        faults=faults,
        hosts=hosts,
        later_hosts=later_hosts,
        scalings=tuple(Scaling(at_s, count) for at_s, count in scalings),
    )
    return simulate(scenario, Invariants(scenario))


def relay_starts(outcome: Outcome) -> list[str]:
    return [event["name"] for event in outcome.of("worker_started") if event["role"] == "relay"]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.kind)
def test_a_host_that_joins_gets_a_relay_which_catches_up_before_anybody_serves_there(
    schedule: Schedule,
) -> None:
    outcome = growing((6.0, 3), schedule=schedule)
    assert {event["replica"]: event["host"] for event in outcome.of("joined")} == {
        "replica-1": "host-1",
        "replica-2": "host-2",
    }
    assert relay_starts(outcome) == ["relay-localhost", "relay-host-1", "relay-host-2"]
    copies: set[tuple[str, int]] = set()
    for event in outcome.events:
        if event.kind == "fetched":
            copies.add((event.fields["host"], event.fields["version"]))
        if event.kind == "pulled" and event.fields["replica"] == "replica-2":
            assert ("host-2", event.fields["version"]) in copies
    first = next(event for event in outcome.of("fetched") if event["host"] == "host-1")
    assert first["version"] > 0, "the newest, and not all those before it"
    assert {"replica-0", "replica-1"} <= {event["replica"] for event in outcome.of("leased")}


def test_the_relay_of_a_host_ends_with_its_last_replica_and_begins_again_with_the_next() -> None:
    outcome = growing((2.0, 3), (5.0, 0), (8.0, 3), steps=24)
    assert relay_starts(outcome).count("relay-localhost") == 1, "the trainer writes into it"
    assert relay_starts(outcome).count("relay-host-1") == relay_starts(outcome).count("relay-host-2") == 2
    assert not outcome.of("worker_died")


@pytest.mark.parametrize("seed", few(range(6), 3))
def test_relays_of_hosts_that_joined_die_again_and_again(seed: int) -> None:
    faults = Faults(failures=(Failures("relay-host*", 1.0), Failures("replica-*", 4.0)))
    outcome = growing((1.0, 4), (4.0, 1), (6.0, 3), schedule=SCHEDULES[seed % len(SCHEDULES)], faults=faults)
    assert any(event["name"].startswith("relay-host") for event in outcome.of("worker_died"))


def test_a_host_that_cannot_have_a_relay_joins_not_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = SimRelay.open

    async def open_(relay: SimRelay, slot_bytes: int) -> Endpoint:
        if relay._address == "host-1":
            raise WeightsError("no memory for 3 slots")
        return await honest(relay, slot_bytes)

    monkeypatch.setattr(SimRelay, "open", open_)
    outcome = growing((2.0, 3))
    [scaled] = [event for event in outcome.of("scaled") if event["reason"] != "a command"]
    assert scaled["replicas"] == 2
    assert scaled["reason"] == "relay-host-1 cannot be there: no memory for 3 slots"
    assert {event["replica"] for event in outcome.of("left")} == {"replica-1"}
    assert {event["replica"] for event in outcome.of("leased")} == {"replica-0", "replica-2"}


def lose(monkeypatch: pytest.MonkeyPatch, host: str, lost_s: float, *workers: str) -> None:
    """From then on none of `workers` starts on `host`."""
    honest = SimRuntime.spawn

    async def spawn(
        runtime: SimRuntime,
        name: str,
        target: str,
        kwargs: object = None,
        *,
        place: Place = HERE,
        **more: float,
    ) -> SimHandle:
        if place.host == host and name in workers and clock.now() > lost_s:
            raise HostLost(f"the node of host {host!r} is lost")
        return await honest(runtime, name, target, kwargs, place=place, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(SimRuntime, "spawn", spawn)


def test_replicas_of_a_host_whose_node_is_lost_for_good_go_to_other_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lose(monkeypatch, "host-1", 3.0, "replica-1", "relay-host-1")
    outcome = growing(
        replicas=3,
        hosts=3,
        later_hosts=0,
        faults=Faults(crashes=(Crash("replica-1", 3.0), Crash("relay-host-1", 3.0))),
        supervision=Supervision(restarts=2, backoff_s=0.05),
    )
    [joined] = outcome.of("joined")
    assert joined["host"] == "host-2" and {event["replica"] for event in outcome.of("left")} == {"replica-1"}
    assert joined["replica"] in {event["replica"] for event in outcome.of("leased")}


@pytest.mark.parametrize("lost", [True, False])
def test_every_replica_that_left_is_told_of_before_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    if lost:  # the relay lives on
        lose(monkeypatch, "host-1", 3.0, "replica-1")
        faults, began = Faults(crashes=(Crash("replica-1", 3.0),)), 3
    else:
        faults, began = Faults(failures=(Failures("replica-1", 0.01),)), 1
    limits = Supervision(restarts=2, backoff_s=0.05)
    outcome = growing((2.0, 3), replicas=began, hosts=3, later_hosts=0, faults=faults, supervision=limits)
    reasons = {event["replica"]: event["reason"] for event in outcome.of("leaving")}
    assert reasons.keys() == {event["replica"] for event in outcome.of("left")} == {"replica-1"}
    assert reasons["replica-1"] == ("the node of its host is lost" if lost else "it could not join")


def test_a_run_whose_trainers_host_can_have_no_relay_any_more_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    lose(monkeypatch, "localhost", 3.0, "relay-localhost")
    with pytest.raises(WorkerError, match=r"relay-localhost died 3 times .*node of host 'localhost' is lost"):
        growing(
            faults=Faults(crashes=(Crash("relay-localhost", 3.0),)),
            supervision=Supervision(restarts=2, backoff_s=0.05),
        )
