"""A run with a standby of the trainer, whose processes are killed for real."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from tests.runs import events, summary, train, weights

from millrace.cli.app import run as command
from millrace.config.load import load
from millrace.run import compose
from millrace.run_directory import run_directory

pytestmark = pytest.mark.usefixtures("warm")

BOTH = "trainer", "trainer-2"
VICTIMS = [("trainer-2",), ("trainer",), BOTH]
"""First the standby, then the one that trains, then both."""


class Killer:
    """A sink. Kills the next victims after the first new step for which both trainers are up, and stops the
    run after the first new step that has no victims."""

    def __init__(self):
        self.victims, self.stop, self._pids = list(VICTIMS), asyncio.Event(), {}

    def __call__(self, event):
        if event.kind == "worker_started" and event.fields["role"] == "trainer":
            self._pids[event.fields["name"]] = event.fields["pid"]
        elif event.kind == "worker_died":
            self._pids.pop(event.fields["name"], None)
        elif event.kind == "step" and not event.fields["replayed"]:
            if not self.victims:
                self.stop.set()
            elif len(self._pids) == 2:
                for name in self.victims.pop(0):
                    os.kill(self._pids.pop(name), signal.SIGKILL)


def test_kills_of_trainer_and_standby_change_nothing_about_the_result(start, tmp_path):
    run, killer = run_directory.create("run", tmp_path / "run"), Killer()
    config = load(start, ["steps=1000", "trainer.standby=true"])
    asyncio.run(compose.train(config, run, killer.stop, killer))
    died = [event.fields["name"] for event in events(run, "worker_died")]
    assert not killer.victims and died[:2] == ["trainer-2", "trainer"] and sorted(died[2:]) == sorted(BOTH)
    assert events(run, "took_over")[0].fields["name"] == "trainer-2"
    steps = events(run, "step")[-1].fields["version"] + 1
    assert command(["train", "--run-dir", str(run.path), "--resume", "--set", f"steps={steps}"]) == 0
    assert summary(run)["accounting"]["trained"] == summary(run)["accounting"]["admitted"] == 16 * steps
    assert weights(run) == weights(train(start, tmp_path / "undisturbed", f"steps={steps}"))
