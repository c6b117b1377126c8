"""A run with a standby of the trainer, whose processes are killed for real."""

from __future__ import annotations

import os
import signal

import pytest
from tests.runs import events, summary, train, weights

pytestmark = pytest.mark.usefixtures("warm")

BOTH = "trainer", "trainer-2"
VICTIMS = [("trainer-2",), ("trainer",), BOTH]
"""First the standby, then the one that trains, then both."""


class Killer:
    """A sink. Kills the next victims after the first new step for which both trainers are up."""

    def __init__(self):
        self.victims, self._pids = list(VICTIMS), {}

    def __call__(self, event):
        if event.kind == "worker_started" and event.fields["role"] == "trainer":
            self._pids[event.fields["name"]] = event.fields["pid"]
        elif event.kind == "worker_died":
            self._pids.pop(event.fields["name"], None)
        elif event.kind == "step" and not event.fields["replayed"] and self.victims and len(self._pids) == 2:
            for name in self.victims.pop(0):
                os.kill(self._pids.pop(name), signal.SIGKILL)


def test_kills_of_trainer_and_standby_change_nothing_about_the_result(start, tmp_path):
    undisturbed = train(start, tmp_path / "undisturbed", "steps=10")
    killer = Killer()
    run = train(start, tmp_path / "run", "steps=10", "trainer.standby=true", sinks=(killer,))
    died = [event.fields["name"] for event in events(run, "worker_died")]
    assert not killer.victims and died[:2] == ["trainer-2", "trainer"] and sorted(died[2:]) == sorted(BOTH)
    assert events(run, "took_over")[0].fields["name"] == "trainer-2"
    assert summary(run)["accounting"]["trained"] == summary(run)["accounting"]["admitted"] == 160
    assert weights(run) == weights(undisturbed)
