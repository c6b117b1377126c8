"""Faults of a Ray cluster whose hosts are network namespaces, for `recovery.py --runtime ray`."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from common import ROOT
from tiny_run import tiny_run

from millrace.core.events import Event
from millrace_chaos.child_run import ChildRun

os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # before Ray is imported
sys.path.append(str(ROOT))

from tests.ray.nodes import Nodes, nodes

HOSTS = 3
CUT_S = 20.0
TIMEOUT_S = 120.0


@dataclass
class Lost:
    """The workers of one host. Each is back once its new incarnation elsewhere is of use: a replica serves, a
    relay has a version, a reward worker is ready, the trainer has made a step that is no replay."""

    address: str
    began_s: float
    waiting: dict[str, str]  # name -> role
    back_s: float | None = None  # until all are of use
    step_s: float | None = None  # until the next step
    _started: set[str] = field(default_factory=set)

    def __call__(self, event: Event) -> None:
        if event.wall_s <= self.began_s:
            return
        fields = event.fields
        if event.kind == "worker_started" and fields["address"] != self.address:
            self._started.add(fields["name"])
            if fields["role"] == "reward worker":
                self.waiting.pop(fields["name"], None)
        elif event.kind == "pulled" and fields["replica"] in self._started:
            self.waiting.pop(fields["replica"], None)
        elif event.kind == "fetched" and (name := f"relay-{fields['host']}") in self._started:
            self.waiting.pop(name, None)
        elif event.kind == "step" and not fields["replayed"]:
            if "trainer" in self._started:
                self.waiting.pop("trainer", None)
            if "trainer" not in self.waiting and self.step_s is None:
                self.step_s = event.wall_s - self.began_s
        if not self.waiting and self.back_s is None:
            self.back_s = event.wall_s - self.began_s


@contextmanager
def run_on_cluster(*overrides: str) -> Iterator[tuple[Nodes, ChildRun]]:
    """Three nodes, and a run that works on all of them. At the end it is stopped, and its accounts close."""
    with nodes(HOSTS) as cluster:
        address = (f"runtime.address={cluster.address}", f"rollout.replicas={HOSTS}")
        prefix = cluster.hosts[0].prefix
        with tiny_run(*overrides, *address, "runtime.kind=ray", prefix=prefix) as run:
            run.start()
            wait(run, lambda: run.version >= 3)
            yield cluster, run
            _stop(run)


def wait(run: ChildRun, done: Callable[[], bool], tell: Callable[[Event], None] = lambda event: None) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not done():
        for event in run.poll():
            tell(event)
        if run.exit_code is not None or time.monotonic() > deadline_s:
            raise SystemExit(f"the run did not go on:\n{run.last_words(40)}")
        time.sleep(0.01)


def measure_faults(*overrides: str) -> dict[str, dict[str, float]]:
    """Seconds of each fault of a host, each on a cluster of its own."""
    return {name: _measure(fault, *overrides) for name, fault in FAULTS.items()}


def _measure(fault: Callable[[Nodes, int], None], *overrides: str) -> dict[str, float]:
    with run_on_cluster(*overrides) as (cluster, run):
        host = cluster.hosts[1]
        there = _workers(run, host.address)
        pids = {pid for fields in there.values() for pid in fields.get("pids") or [fields["pid"]]}
        waiting = {name: fields["role"] for name, fields in there.items()}
        if RANKS[0] in overrides:
            pids.add(rank := run.pids("trainer")["trainer.1"])
            assert rank in cluster.pids(1), "it is on another node"
            waiting["trainer"] = "trainer"
        lost = Lost(host.address, time.time(), waiting)
        num_lost = len(lost.waiting)
        fault(cluster, 1)
        wait(run, lambda: lost.back_s is not None and lost.step_s is not None, lost)
        assert lost.back_s is not None and lost.step_s is not None
        figures = {"until_back": lost.back_s, "until_step": lost.step_s, "workers": float(num_lost)}
        if fault is cut:
            figures["fenced"] = _fenced_s(run, cluster, pids, lost.began_s)
            wait(run, lambda: time.time() > lost.began_s + CUT_S)
            host.link(up=True)
            version = run.version
            wait(run, lambda: run.version >= version + 3)
    return figures


def _fenced_s(run: ChildRun, cluster: Nodes, pids: set[int], began_s: float) -> float:
    """Until the workers that were cut off have ended themselves. The link is still down."""
    wait(run, lambda: not pids & set(cluster.pids(1)))
    return time.time() - began_s


def _workers(run: ChildRun, address: str) -> dict[str, dict[str, Any]]:
    """The fields of `worker_started` of those whose newest incarnation is there."""
    newest = {event.fields["name"]: event.fields for event in run.events if event.kind == "worker_started"}
    return {name: fields for name, fields in newest.items() if fields["address"] == address}


def _stop(run: ChildRun) -> None:
    for pid in run.processes():
        os.kill(pid, signal.SIGTERM)
    deadline_s = time.monotonic() + TIMEOUT_S
    while not (ended := [event for event in run.poll() if event.kind == "run_ended"]):
        if time.monotonic() > deadline_s:
            raise SystemExit(f"the run did not end:\n{run.last_words(40)}")
        time.sleep(0.05)
    counts = dict(ended[-1].fields["accounting"])
    if counts.pop("admitted") != sum(counts.values()) or counts["failed"]:
        raise SystemExit(f"the accounts do not close: {ended[-1].fields['accounting']}")


def cut(cluster: Nodes, index: int) -> None:
    cluster.hosts[index].link(up=False)


FAULTS: dict[str, Callable[[Nodes, int], None]] = {
    "raylet": Nodes.kill_raylet,
    "node": Nodes.kill,
    "link": cut,
}
"""Of the second host: it carries a replica, a relay, and with `RANKS` the trainer's second rank."""
RANKS = ("trainer.shard=2", "trainer.hosts=2")
