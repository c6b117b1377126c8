"""Ranks of one trainer on two of three nodes, each in a network namespace."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.namespaces import refusal
from tests.ray.nodes import nodes
from tests.ray.test_nodes import until
from tests.runs import train, weights

from millrace_chaos.child_run import ChildRun

RUN = ("steps=12", "trainer.shard=2", "rollout.replicas=3")
RAY = ("trainer.hosts=2", "runtime.kind=ray", "supervision.heartbeat_timeout_s=5")


def test_two_ranks_on_two_nodes_train_the_weights_of_a_local_run_though_one_and_then_its_node_is_killed(
    start: Path, tmp_path: Path
) -> None:
    if why := refusal():
        pytest.skip(why)
    here = train(start, tmp_path / "here" / "run", *RUN)
    with nodes(3) as cluster:
        options = (*RUN, *RAY, f"runtime.address={cluster.address}")
        run = ChildRun(start, tmp_path / "run", options, prefix=cluster.hosts[0].prefix)
        try:
            run.start()
            until(run, lambda event: event.kind == "step" and event.fields["version"] == 3)
            second = run.pids("trainer")["trainer.1"]
            [node] = [index for index in (1, 2) if second in cluster.pids(index)]  # of its own
            os.kill(second, signal.SIGKILL)
            until(run, lambda event: event.kind == "step" and event.fields["version"] == 6)
            cluster.kill(node)
            ended = until(run, lambda event: event.kind == "run_ended")
        finally:
            run.end()
    assert ended.fields["ok"], run.last_words(40)
    died = [event.fields["name"] for event in run.events if event.kind == "worker_died"]
    assert died[0] == "trainer" and {"trainer", f"relay-{cluster.hosts[node].address}"} <= {*died[1:]}
    fetched = [event.fields for event in run.events if event.kind == "fetched"]
    assert {fields["host"] for fields in fetched if fields["received_bytes"]} == {
        event.fields["name"].removeprefix("relay-")
        for event in run.events
        if event.kind == "worker_started" and event.fields["role"] == "relay"
    }
    assert weights(run.directory) == weights(here)
