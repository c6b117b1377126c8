"""A whole run whose processes are killed for real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from tests.long import long
from tests.runs import events, summary, train, weights

from millrace.diagnose.examine import examine
from millrace.ledger.reading import LedgerReader
from millrace.run_directory.run_directory import RunDirectory
from millrace_ui.record.views import run_view
from millrace_ui.speed_answer import speed_of

DEADLINE_S = 200.0


pytestmark = pytest.mark.usefixtures("warm")


class Killer:
    """A sink that sends SIGKILL to a worker of `role` at the first event that `when` accepts."""

    def __init__(self, role, when):
        self._role, self._when, self._pids = role, when, {}
        self.killed = None

    def __call__(self, event):
        if event.kind == "worker_started" and event.fields["role"] == self._role:
            self._pids[event.fields["name"]] = event.fields["pid"]
        if self.killed is None and self._pids and self._when(event):
            self.killed = event.fields.get("replica") or min(self._pids)
            os.kill(self._pids[self.killed], signal.SIGKILL)


def _given_work(event):
    return event.kind == "leased" and event.fields["version"] >= 1


def _second_step(event):
    return event.kind == "step" and event.fields["version"] == 2


@pytest.mark.parametrize(
    ("role", "when"),
    [
        ("replica", _given_work),
        ("trainer", _second_step),
        ("relay", _second_step),
        ("reward worker", lambda event: event.kind == "scored"),
    ],
)
def test_a_killed_worker_changes_nothing_about_the_result(role, when, start, undisturbed, tmp_path):
    killer = Killer(role, when)
    run = train(start, tmp_path / "run", sinks=(killer,))
    assert [e.fields["name"] for e in events(run, "worker_died")] == [killer.killed]
    accounting = summary(run)["accounting"]
    assert accounting["trained"] == accounting["admitted"] == 64
    assert weights(run) == weights(undisturbed)


@long
def test_a_killed_replica_loses_nothing_of_cut_sampling(start, tmp_path):
    cut = ("sampling.top_p=0.9",)
    undisturbed = train(start, tmp_path / "undisturbed", *cut)
    killer = Killer("replica", _given_work)
    run = train(start, tmp_path / "run", *cut, sinks=(killer,))
    assert [e.fields["name"] for e in events(run, "worker_died")] == [killer.killed]
    assert weights(run) == weights(undisturbed)
    assert summary(run)["logprob_gap_staleness0"]["max"] < 1e-5


@long
def test_a_killed_trainer_repeats_all_optimizer_steps_of_a_batch(start, tmp_path):
    several = "batch.minibatches=2", "batch.epochs=2", "algorithm.kind=gspo"
    undisturbed = train(start, tmp_path / "undisturbed", *several)
    killer = Killer("trainer", _second_step)
    run = train(start, tmp_path / "run", *several, sinks=(killer,))
    assert [e.fields["name"] for e in events(run, "worker_died")] == [killer.killed]
    assert weights(run) == weights(undisturbed)
    assert {e.fields["metrics"]["updates"] for e in events(run, "step")} == {4.0}


def test_a_run_tells_what_its_workers_compute_in(undisturbed):
    computes = {e.fields["name"]: e.fields["computes"] for e in events(undisturbed, "computes")}
    assert computes.pop("trainer") == "float32"
    assert sorted(computes) == ["replica-0", "replica-1"]
    assert all(text.startswith("float32; exact") for text in computes.values())
    with LedgerReader(undisturbed.ledger) as reader:
        assert run_view(reader, undisturbed)["computes"] == {"trainer": "float32", **computes}


def test_the_time_of_every_role_of_a_run_adds_up(undisturbed):
    use = speed_of(undisturbed).use
    assert use.steps >= 2
    assert sum(use.trainer.values()) == pytest.approx(use.took_s, rel=0.01)
    assert sorted(use.replicas) == ["replica-0", "replica-1"]
    assert all(0.5 * use.took_s < sum(each.values()) < 1.5 * use.took_s for each in use.replicas.values())
    assert use.rewards["busy"] > 0
    assert examine(undisturbed)["bottleneck"]["name"] != "unknown"


def test_a_killed_controller_resumes_to_the_same_weights(start, undisturbed, tmp_path):
    command = [sys.executable, "-m", "millrace", "train", str(start), "--run-dir", str(tmp_path / "run")]
    run = RunDirectory(tmp_path / "run")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        _wait_until(lambda: run.events.exists() and len(events(run, "step")) >= 3)
        process.kill()
    subprocess.run([*command, "--resume"], check=True, timeout=DEADLINE_S, stdout=subprocess.DEVNULL)
    with LedgerReader(run.ledger) as reader:
        trained = [i for step in reader.steps() for i in step.trajectory_ids]
    assert sorted(trained) == list(range(64))
    assert weights(run) == weights(undisturbed)


def _wait_until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
