"""A node that is added to the cluster of a running run is used, and one that is gone is done without."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.namespaces import refusal
from tests.ray.nodes import nodes

from millrace.core.events import Event
from millrace.run.scaling import scale
from millrace_chaos.child_run import ChildRun

WAIT_S = 200.0
OPTIONS = (
    "steps=1000000",
    "schedule.kind=millrace",
    "rollout.replicas=1",
    "supervision.heartbeat_timeout_s=3",
    "supervision.restarts=3",
    "runtime.kind=ray",
)


def until(run: ChildRun, done: Callable[[Event], bool]) -> Event:
    """The first event from the start on that is `done`."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        run.poll()
        for event in run.events:
            if done(event):
                return event
        if run.exit_code is not None or time.monotonic() > deadline_s:
            pytest.fail(f"the run did not go on:\n{run.last_words(40)}")
        time.sleep(0.1)


def of_replica(kind: str, name: str) -> Callable[[Event], bool]:
    return lambda event: event.kind == kind and event.fields["replica"] == name


def test_a_node_that_is_added_gets_replicas_and_when_it_is_lost_they_go_elsewhere(
    start: Path, tmp_path: Path
) -> None:
    if why := refusal():
        pytest.skip(why)
    with nodes(1, spare=1) as cluster:
        options = (*OPTIONS, f"runtime.address={cluster.address}")
        run = ChildRun(start, tmp_path / "run", options, prefix=cluster.hosts[0].prefix)
        try:
            run.start()
            until(run, lambda event: event.kind == "step")
            added = cluster.hosts[1].address
            cluster.join(1, "--num-gpus=1")  # for Ray: no other node can take its place
            scale(run.directory, 2, timeout_s=WAIT_S)
            assert until(run, of_replica("joined", "replica-1")).fields["host"] == added
            until(run, lambda event: event.kind == "fetched" and event.fields["host"] == added)
            until(run, of_replica("leased", "replica-1"))
            started = {event.fields["name"]: event for event in run.events if event.kind == "worker_started"}
            assert started["replica-1"].fields["address"] == started[f"relay-{added}"].fields["address"]

            scale(run.directory, 1, timeout_s=WAIT_S)
            scale(run.directory, 3, timeout_s=WAIT_S)
            run.poll()
            gone = {event.fields["replica"] for event in run.events if event.kind == "left"}
            [lost] = [
                event.fields["replica"]
                for event in run.events
                if event.kind == "joined"
                and event.fields["host"] == added
                and event.fields["replica"] not in gone
            ]
            cluster.kill(1)
            left = until(run, of_replica("left", lost))
            again = until(run, lambda event: event.kind == "joined" and event.time_s > left.time_s)
            assert again.fields["host"] != added
            until(run, of_replica("leased", again.fields["replica"]))
            for pid in run.processes():
                os.kill(pid, signal.SIGTERM)
            ended = until(run, lambda event: event.kind == "run_ended")
        finally:
            run.end()
    assert ended.fields["ok"] and ended.fields["reason"] == "stopped"
    counts = ended.fields["accounting"]
    assert counts.pop("admitted") == sum(counts.values()) and counts["failed"] == 0
