"""A whole run over hosts with networks of their own, whose relays meet over links that can be cut."""

from __future__ import annotations

import os
import signal
import time

import pytest
from tests.long import long
from tests.namespaces import hosts as namespaces
from tests.runs import events, summary, train, weights

from millrace.core.placement import Host
from millrace.run import run_hosts

STEPS, GB = 60, 1_000_000_000
STEP_S = 0.5  # of a step while the last host is behind
SETS = (f"steps={STEPS}", "rollout.replicas=3", "batch.prompts=6", "checkpoints.every=100")

pytestmark = pytest.mark.usefixtures("warm")


class Faults:
    """A sink. First the middle relay of the chain is killed, then the last host is cut off until its relay
    has given up once. Steps are slow from the cut until that relay follows again: nobody waits for it."""

    def __init__(self, middle, last):
        self._middle, self._last, self._pids = middle.name, last, {}
        self._next = iter((self._kill, self._cut, self._mend, self._follow))
        self._due = next(self._next)

    def __call__(self, event):
        if event.kind == "worker_started":
            self._pids[event.fields["name"]] = event.fields["pid"]
        if self._due is not None and self._due(event):
            self._due = next(self._next, None)

    def _kill(self, event):
        """Once the last host serves what came down the chain."""
        due = (
            event.kind == "pulled" and event.fields["replica"] == "replica-1" and event.fields["version"] > 0
        )
        if due:
            os.kill(self._pids[f"relay-{self._middle}"], signal.SIGKILL)
        return due

    def _cut(self, event):
        """Once the new relay in the middle has got a version."""
        due = event.kind == "fetched" and event.fields["host"] == self._middle
        if due and f"relay-{self._middle}" in self._pids:
            self._last.link(up=False)
        return due

    def _mend(self, event):
        """Once its relay has given up."""
        self._slow(event)
        due = event.kind == "fetch_missed" and event.fields["host"] == self._last.name
        if due:
            self._last.link(up=True)
        return due

    def _follow(self, event):
        """Until its relay has got a version over the mended link."""
        self._slow(event)
        return event.kind == "fetched" and event.fields["host"] == self._last.name

    def _slow(self, event):
        if event.kind == "step":
            time.sleep(STEP_S)


@long
def test_a_run_survives_a_killed_relay_in_the_chain_and_a_link_that_is_cut(start, tmp_path, monkeypatch):
    undisturbed = train(start, tmp_path / "undisturbed", *SETS)
    with namespaces(3) as made:
        first, middle, last = made
        found = tuple(Host(host.name, 2, 8 * GB, 8 * GB, address=host.address) for host in made)
        monkeypatch.setattr(run_hosts, "hosts", lambda config, this: found)
        monkeypatch.setattr(run_hosts, "logical", lambda config: {host.name: host.prefix for host in made})
        run = train(start, tmp_path / "run", *SETS, sinks=(Faults(middle, last),))
    assert [e.fields["name"] for e in events(run, "worker_died")] == [f"relay-{middle.name}"]
    fetched, missed = events(run, "fetched"), events(run, "fetch_missed")
    sources = {e.fields["source"].partition(":")[0] for e in fetched if e.fields["host"] == last.name}
    assert middle.address in sources <= {first.address, middle.address}, "a chain, and its fallback"
    assert {e.fields["host"] for e in missed} == {last.name}
    since = missed[0].time_s
    assert [e for e in fetched if e.fields["host"] == last.name and e.time_s > since], "it follows again"
    accounting = summary(run)["accounting"]
    assert accounting["trained"] == accounting["admitted"] == 6 * 4 * STEPS
    assert weights(run) == weights(undisturbed)
