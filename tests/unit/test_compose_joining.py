"""Where replicas go that join, as hosts come and go."""

from __future__ import annotations

import asyncio
import threading

import pytest
from placement_needs import GB, ON_CPU
from test_placement_hosts import config_for, host

from millrace.config.schema import Config
from millrace.config.tables.operation import LocalHosts, RayCluster, Runtime
from millrace.controller.supervisor import WorkerSpec
from millrace.core.errors import ConfigError, WorkerError
from millrace.core.placement import Host, Place
from millrace.placement.assign import Placement
from millrace.placement.hosts import Present, lay_out
from millrace.run import run_hosts
from millrace.run.run_hosts import Joining


def replica(name: str, place: Place) -> WorkerSpec:
    return WorkerSpec("replica", name, "target", place=place)


def relay(placed: Placement) -> WorkerSpec:
    return WorkerSpec("relay", f"relay-{placed.host.name}", "target", place=placed.relay)


def joining_on(
    *hosts: Host, replicas: int, runtime: Runtime = LocalHosts()
) -> tuple[Joining, list[WorkerSpec]]:
    """And the replicas of the start."""
    config: Config = config_for(replicas).model_copy(update={"runtime": runtime})
    layout = lay_out(config, list(hosts), ON_CPU)
    there = [replica(f"replica-{i}", place) for i, place in enumerate(layout.replicas)]
    return Joining(config, layout, replica=replica, relay=relay), there


def where(specs: list[WorkerSpec]) -> list[str]:
    return [spec.place.host for spec in specs]


@pytest.fixture(autouse=True)
def much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_hosts, "read_memory", lambda: (1_000 * GB, 1_000 * GB))


def test_replicas_join_on_hosts_that_nobody_used_and_bring_a_relay() -> None:
    fleet, there = joining_on(host("a"), host("b", cores=4), host("c", cores=4), replicas=1)
    joined = fleet.join(["replica-1", "replica-2", "replica-3"], there)
    assert where(joined) == ["b", "c", "a"]
    assert [fleet.relay(name).name for name in "ab"] == ["relay-a", "relay-b"]


def test_a_relay_counts_where_it_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, there = joining_on(host("a"), host("b", cores=4), replicas=1)
    monkeypatch.setattr(run_hosts, "read_memory", lambda: (1_000 * GB, 8 * GB))
    assert where(fleet.join(["replica-1"], there)) == ["a"], "b would need room for the relay, too"


def test_nodes_of_a_cluster_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, there = joining_on(host("a"), host("b"), replicas=2, runtime=RayCluster(address="a:1"))
    assert where(fleet.join(["replica-2"], there)) == ["a"]
    cluster = Present((host("c"),), frozenset(), ("node d: it has no model",))
    monkeypatch.setattr(run_hosts, "wing", lambda name: lambda config, runtime: cluster)
    asyncio.run(fleet.look())
    [new] = fleet.join(["replica-2"], there)
    assert new.place.host == "c" and fleet.relay("c").name == "relay-c"

    cluster = Present((), frozenset({"b"}), cluster.problems)
    asyncio.run(fleet.look())
    left = [spec for spec in (*there, new) if spec.place.host != "b"]
    assert where(fleet.join(["replica-3", "replica-4"], left)) == ["a", "c"], "b is lost"


def test_why_nodes_cannot_be_used_is_said_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, there = joining_on(host("a"), host("b"), replicas=1, runtime=RayCluster(address="a:1"))
    small = replace_memory(host("c"), GB)
    cluster = Present((small,), frozenset({"a", "b"}), ("node d: it has no model",))
    monkeypatch.setattr(run_hosts, "wing", lambda name: lambda config, runtime: cluster)
    asyncio.run(fleet.look())
    with pytest.raises(
        ConfigError, match=r"no room for 1 more replica.*; node d: it has no model; c: the host has"
    ):
        fleet.join(["replica-1"], there)


def replace_memory(one: Host, num_bytes: int) -> Host:
    return Host(one.name, one.cores, num_bytes, num_bytes, one.gpus, one.address)


def test_a_cluster_that_cannot_be_reached_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(config: Config, runtime: RayCluster) -> Present:
        raise WorkerError("gone")

    fleet, _ = joining_on(host("a"), replicas=1, runtime=RayCluster(address="a:1"))
    monkeypatch.setattr(run_hosts, "wing", lambda name: unreachable)
    with pytest.raises(WorkerError, match="gone"):
        asyncio.run(fleet.look())


def test_a_cluster_that_does_not_answer_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error after a while, and who ends sooner waits for no thread."""
    fleet, _ = joining_on(host("a"), replicas=1, runtime=RayCluster(address="a:1"))
    given_up = threading.Event()
    safety = threading.Timer(20.0, given_up.set)
    monkeypatch.setattr(run_hosts, "wing", lambda name: lambda config, runtime: given_up.wait())
    safety.start()
    try:
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(fleet.look(), 0.01))
        monkeypatch.setattr(run_hosts, "ANSWER_S", 0.01)
        with pytest.raises(WorkerError, match="has not listed its nodes"):
            asyncio.run(fleet.look())
        assert not given_up.is_set()
    finally:
        safety.cancel()
        given_up.set()
