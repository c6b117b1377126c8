"""A run on three nodes, each in a network namespace, goes on whatever of them dies or is cut off."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.namespaces import refusal
from tests.ray.nodes import Nodes, nodes
from tests.ray.test_run import steps
from tests.runs import train, weights

from millrace.core.events import Event
from millrace.ledger.reading import LedgerReader
from millrace_chaos.child_run import ChildRun

WAIT_S = 200.0
CUT_S = 20.0
OPTIONS = (
    "steps=1000000",
    "rollout.replicas=3",
    "supervision.heartbeat_timeout_s=3",
    "supervision.restarts=1000",
    "runtime.kind=ray",
)


def until(run: ChildRun, done: Callable[[Event], bool]) -> Event:
    """The first new event that is `done`."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        for event in run.poll():
            if done(event):
                return event
        if run.exit_code is not None or time.monotonic() > deadline_s:
            pytest.fail(f"the run did not go on:\n{run.last_words(40)}")
        time.sleep(0.02)


def until_back(run: ChildRun, names: set[str], address: str | None = None) -> None:
    """New incarnations of `names` have started, on another node than `address`; then a step was made."""

    def back(event: Event) -> bool:
        if event.kind == "worker_started" and event.fields["address"] != address:
            names.discard(event.fields["name"])
        return not names

    until(run, back)
    until(run, lambda event: event.kind == "step")


def kill_an_actor(cluster: Nodes, run: ChildRun) -> None:
    os.kill(run.pids("replica")["replica-0"], signal.SIGKILL)
    until_back(run, {"replica-0"})


def kill_a_raylet(cluster: Nodes, run: ChildRun) -> None:
    lost = cluster.hosts[1].address
    cluster.kill_raylet(1)
    until_back(run, {f"relay-{lost}", "replica-0"}, lost)


def cut_a_link(cluster: Nodes, run: ChildRun) -> None:
    host, before_s = cluster.hosts[2], time.monotonic()
    cut = set(cluster.pids(2, "ray::"))
    host.link(up=False)
    until_back(run, {f"relay-{host.address}", "replica-1"}, host.address)
    while time.monotonic() < before_s + CUT_S:
        run.poll()
        time.sleep(0.1)
    host.link(up=True)
    deadline_s = time.monotonic() + WAIT_S
    while cut & set(cluster.pids(2)):
        assert time.monotonic() < deadline_s, "a worker that was cut off lives on"
        time.sleep(0.1)


def test_a_run_on_three_nodes_outlives_an_actor_a_raylet_and_a_link(start: Path, tmp_path: Path) -> None:
    if why := refusal():
        pytest.skip(why)
    with nodes(3) as cluster:
        options = (*OPTIONS, f"runtime.address={cluster.address}")
        run = ChildRun(start, tmp_path / "run", options, prefix=cluster.hosts[0].prefix)
        try:
            run.start()
            until_back(run, {"replica-0", "replica-1"})  # the first step may need only one of them
            for fault in (kill_an_actor, kill_a_raylet, cut_a_link):
                fault(cluster, run)
            for pid in run.processes():
                os.kill(pid, signal.SIGTERM)
            until(run, lambda event: event.kind == "run_ended")
        finally:
            run.end()
    with LedgerReader(run.directory.ledger) as reader:
        trained = [group for step in reader.steps() for group in step.group_ids]
    assert trained == list(range(len(trained))), "synchronous: every group once, in order"
    [ended] = [event for event in run.events if event.kind == "run_ended"]
    assert ended.fields["ok"] and ended.fields["reason"] == "stopped"
    counts = ended.fields["accounting"]
    assert counts.pop("admitted") == sum(counts.values())
    assert counts["trained"] == 4 * len(trained) and counts["failed"] == 0


def test_a_run_that_loses_a_whole_node_trains_what_a_run_in_processes_trains(
    start: Path, tmp_path: Path
) -> None:
    """All of the node at once: its raylet, its actors, its relay."""
    if why := refusal():
        pytest.skip(why)
    same = ("steps=80", "rollout.replicas=3", "trainer.shard=2", "checkpoints.every=100")
    here = train(start, tmp_path / "here" / "run", *same)
    with nodes(3) as cluster:
        lost, address = cluster.hosts[1].address, f"runtime.address={cluster.address}"
        options = (*same, "supervision.heartbeat_timeout_s=3", "runtime.kind=ray", address)
        run = ChildRun(start, tmp_path / "run", options, prefix=cluster.hosts[0].prefix)
        try:
            run.start()
            until(run, lambda event: event.kind == "step")
            relays = {e.fields["name"] for e in run.events if e.fields.get("role") == "relay"}
            assert len(relays) == 3
            there = {e.fields["name"] for e in run.events if e.fields.get("address") == lost}
            assert f"relay-{lost}" in there and len(there) > 1
            cluster.kill(1)
            until_back(run, there, lost)
            until(run, lambda event: event.kind == "run_ended")
        finally:
            run.end()
    [ended] = [event for event in run.events if event.kind == "run_ended"]
    counts = ended.fields["accounting"]
    assert counts["trained"] == counts["admitted"] == 80 * 16
    assert steps(run.directory) == steps(here)
    assert weights(run.directory) == weights(here), "bit for bit"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_head_that_is_gone_ends_the_run_with_one_message_that_names_it(
    number: signal.Signals, start: Path, tmp_path: Path
) -> None:
    if why := refusal():
        pytest.skip(why)
    with nodes(2) as cluster:
        options = (*OPTIONS, f"runtime.address={cluster.address}")
        run = ChildRun(start, tmp_path / "run", options, prefix=cluster.hosts[0].prefix)
        try:
            run.start()
            until(run, lambda event: event.kind == "step")
            [head] = cluster.pids(0, "/gcs_server ")
            os.kill(head, number)
            deadline_s = time.monotonic() + WAIT_S
            while run.exit_code is None:
                assert time.monotonic() < deadline_s, run.last_words(40)
                time.sleep(0.1)
            text = run.session_words()
            assert run.exit_code == 1 and "Traceback" not in text
            errors = [line for line in text.splitlines() if line.startswith("ClusterError")]
            assert len(errors) == 1, text
            why = "takes no connection" if number == signal.SIGKILL else "takes connections, but has answered"
            assert f"the head of the Ray cluster, {cluster.address}, {why}" in errors[0]
            assert not run.leftovers()
        finally:
            run.end()
