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

from millrace.chaos.child_run import ChildRun
from millrace.core.events import Event
from millrace.reading.reader import LedgerReader

WAIT_S = 90.0
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
    """New incarnations of `names` have started, on another node than `address`; and a step was made."""

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
            until(run, lambda event: event.kind == "step")
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
