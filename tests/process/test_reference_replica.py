"""A whole run whose trainer holds no reference: a worker of its own scores what is trained, and is killed."""

from __future__ import annotations

import os
import signal

import pytest
from tests.runs import events, summary, train, weights

APART = ("algorithm.kl=0.1", "algorithm.reference=replica", "optimizer.lr=1e-2")

pytestmark = pytest.mark.usefixtures("warm")


class Killer:
    """A sink that sends SIGKILL to the reference after the second step."""

    def __init__(self):
        self._pid, self.killed = 0, False

    def __call__(self, event):
        if event.kind == "worker_started" and event.fields["role"] == "reference":
            self._pid = event.fields["pid"]
        if event.kind == "step" and event.fields["version"] == 2 and not self.killed:
            self.killed = True
            os.kill(self._pid, signal.SIGKILL)


def test_a_killed_reference_changes_nothing_about_the_result(start, tmp_path):
    undisturbed, killed = (
        train(start, tmp_path / name, *APART, sinks=sinks)
        for name, sinks in (("undisturbed", ()), ("killed", (Killer(),)))
    )
    assert [e.fields["name"] for e in events(killed, "worker_died")] == ["reference"]
    assert "reference" in {e.fields["name"] for e in events(killed, "computes")}
    assert events(killed, "step")[-1].fields["metrics"]["kl_reference"] > 0
    assert weights(killed) == weights(undisturbed)
    assert summary(killed)["accounting"] == summary(undisturbed)["accounting"]
