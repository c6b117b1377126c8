"""Labels of nodes say what runs where, and the controller's node can be the controller's alone."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.namespaces import refusal
from tests.ray.nodes import nodes

from millrace.observe.sinks.jsonl import read_events
from millrace_chaos.child_run import ChildRun

WAIT_S = 200.0


def test_every_worker_is_on_a_node_whose_label_allows_it(start: Path, tmp_path: Path) -> None:
    if why := refusal():
        pytest.skip(why)
    with nodes(3, roles=("none", "trainer.reward", "rollout")) as cluster:
        options = ("steps=2", "runtime.kind=ray", f"runtime.address={cluster.address}")
        run = ChildRun(start, tmp_path / "run", options, prefix=cluster.hosts[0].prefix)
        try:
            run.start()
            deadline_s = time.monotonic() + WAIT_S
            while run.exit_code is None and time.monotonic() < deadline_s:
                time.sleep(0.1)
            assert run.exit_code == 0, run.last_words(40)
        finally:
            run.end()
    _, trainers, rollouts = (host.address for host in cluster.hosts)
    where: dict[str, set[str]] = {}
    for event in read_events(run.directory.events, "worker_started"):
        where.setdefault(event.fields["role"], set()).add(event.fields["address"])
    assert where == {
        "trainer": {trainers},
        "reward worker": {trainers},
        "replica": {rollouts},
        "relay": {trainers, rollouts},
    }
