"""A worker stopped in the middle of its work is noticed, replaced, and changes nothing about the result."""

from __future__ import annotations

import os
import signal
from collections import Counter

from tests.runs import events, summary, train, weights

from millrace.controller import controller


class Freezer:
    """A sink that stops one worker of each role, where the next thing it is asked for will hang."""

    def __init__(self):
        self._pids, self._seen, self.frozen = {}, Counter(), []

    def __call__(self, event):
        self._seen[event.kind] += 1
        if event.kind == "worker_started":
            self._pids[event.fields["name"]] = event.fields["pid"]
        for name, moment in (
            ("reward-worker-0", event.kind == "worker_started"),  # before its first prompts
            ("trainer", self._seen["scored"] == 16),  # its first batch is complete: in its step
            ("relay", event.kind == "published" and event.fields["version"] == 2),  # before it stages
            ("replica-0", event.kind == "staged" and event.fields["version"] == 3),  # before it pulls
        ):
            if moment and name in self._pids and name not in self.frozen:
                self.frozen.append(name)
                os.kill(self._pids[name], signal.SIGSTOP)


def test_a_worker_frozen_at_its_work_is_replaced(start, undisturbed, warm, tmp_path, monkeypatch):
    freezer = Freezer()
    monkeypatch.setattr(controller, "QUIET_S", 0.2)
    run = train(start, tmp_path / "run", "supervision.heartbeat_timeout_s=2", sinks=(freezer,))
    assert sorted(freezer.frozen) == ["relay", "replica-0", "reward-worker-0", "trainer"]
    assert {e.fields["name"] for e in events(run, "worker_died")} >= set(freezer.frozen)
    assert summary(run)["accounting"]["trained"] == 64
    assert weights(run) == weights(undisturbed)
    assert any("waits for" in line for e in events(run, "stalled") for line in e.fields["waits"])
    assert "task decide" in (run.logs / "controller.stacks").read_text()
    assert "Current thread" in (run.logs / "replica-1.1.log").read_text()
