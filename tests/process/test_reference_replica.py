"""A whole run whose trainer holds no reference: a worker of its own scores what is trained, and is killed."""

from __future__ import annotations

import os
import signal

import pytest
from tests.runs import events, summary, train, weights

COPY = ("algorithm.kl=0.1", "optimizer.lr=1e-2")
APART = (*COPY, "algorithm.reference=replica")

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


def test_a_run_whose_reference_is_killed_ends_as_one_with_a_frozen_copy(start, tmp_path):
    copy, apart = (
        train(start, tmp_path / "copy", *COPY),
        train(start, tmp_path / "apart", *APART, sinks=(Killer(),)),
    )
    assert [e.fields["name"] for e in events(apart, "worker_died")] == ["reference"]
    assert "reference" in {e.fields["name"] for e in events(apart, "computes")}
    assert events(apart, "step")[-1].fields["metrics"]["kl_reference"] > 0
    assert weights(apart) == weights(copy)
    assert summary(apart)["accounting"] == summary(copy)["accounting"]
