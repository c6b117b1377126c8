"""Evaluations beside a run of real processes: killed, resumed, and no part of what is learned."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from tests.long import long
from tests.runs import events, summary, train, weights

from millrace.ledger.reading import LedgerReader
from millrace.run_directory.run_directory import RunDirectory

DEADLINE_S = 200.0
EVALUATIONS = (
    'evaluations=[{name = "held-out", every = 2, prompts = 6, samples = 2, by = "reward", keep_best = true},'
    ' {name = "short", every = 4, prompts = 4, samples = 0, task = { kind = "gym", name = "spell_backward",'
    ' data_seed = 9, template = "{metadata[word]}>", options = { min_word_len = 3, max_word_len = 3 } }}]'
)


pytestmark = pytest.mark.usefixtures("warm")


def evaluated(run):
    """(name, version) -> why it was skipped; empty: it was done."""
    with LedgerReader(run.ledger) as reader:
        records = reader.evaluations()
        for one in records:
            found = len(reader.attempts(one.name, one.version))
            assert found == (0 if one.reason else {"held-out": 18, "short": 4}[one.name])
    assert len({(one.name, one.version) for one in records}) == len(records)
    return {(one.name, one.version): one.reason for one in records}


def test_a_killed_evaluator_changes_nothing_about_what_is_learned(start, undisturbed, tmp_path):
    pids = []

    def kill(event):
        if event.kind == "worker_started" and event.fields["role"] == "evaluator":
            pids.append(event.fields["pid"])
        if event.kind == "computes" and event.fields["name"] == "evaluator":
            os.kill(pids[0], signal.SIGKILL)  # it has just been given its first work

    run = train(start, tmp_path / "run", EVALUATIONS, sinks=(kill,))
    assert [e.fields["name"] for e in events(run, "worker_died")] == ["evaluator"]
    found = evaluated(run)
    due = {("held-out", 0), ("held-out", 2), ("held-out", 4), ("short", 0), ("short", 4)}
    gone = {one for one in due if "is evaluated in its place" in found[one]}  # on a slow machine
    assert due <= set(found)
    assert all(found[one] == "" and any(one[0] == each[0] for each in gone) for one in set(found) - due)
    assert found["held-out", 4] == found["short", 4] == ""
    assert weights(run) == weights(undisturbed)
    assert summary(run)["accounting"] == summary(undisturbed)["accounting"]


def test_a_killed_controller_evaluates_no_version_twice(start, undisturbed, tmp_path):
    command = [sys.executable, "-m", "millrace", "train", str(start), "--run-dir", str(tmp_path / "run")]
    command += ["--set", EVALUATIONS]
    run = RunDirectory(tmp_path / "run")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        deadline_s = time.monotonic() + DEADLINE_S
        while not (run.events.exists() and events(run, "evaluated") and events(run, "step")):
            assert time.monotonic() < deadline_s, "nothing was evaluated"
            time.sleep(0.01)
        process.kill()
    first = [(e.fields["name"], e.fields["version"]) for e in events(run, "evaluated")]
    subprocess.run([*command, "--resume"], check=True, timeout=DEADLINE_S, stdout=subprocess.DEVNULL)
    found = evaluated(run)
    assert all(found[one] == "" for one in first)
    assert found["held-out", 4] == found["short", 4] == ""
    assert weights(run) == weights(undisturbed)


@long
def test_in_place_of_a_version_that_a_killed_controller_had_under_way_a_newer_one_is_evaluated(
    start, undisturbed, tmp_path
):
    command = [sys.executable, "-m", "millrace", "train", str(start), "--run-dir", str(tmp_path / "run")]
    slow = 'evaluations=[{name = "held-out", every = 4, prompts = 6, samples = 2, share = SHARE}]'
    run = RunDirectory(tmp_path / "run")
    resting = [*command, "--set", slow.replace("SHARE", "0.001")]
    with subprocess.Popen(resting, stdout=subprocess.DEVNULL) as process:
        deadline_s = time.monotonic() + DEADLINE_S
        while not (run.events.exists() and events(run, "step")):
            assert time.monotonic() < deadline_s, "no step"
            time.sleep(0.01)
        process.kill()
    assert not events(run, "evaluated")
    resume = [*command, "--set", slow.replace("SHARE", "1.0"), "--resume"]
    subprocess.run(resume, check=True, timeout=DEADLINE_S, stdout=subprocess.DEVNULL)
    found = {version: reason for (_, version), reason in evaluated(run).items()}
    assert "is evaluated in its place" in found.pop(0)
    assert set(found.values()) == {""} and max(found) == 4
    assert weights(run) == weights(undisturbed)


def test_the_best_checkpoint_is_kept(start, tmp_path):
    each_step = EVALUATIONS.replace("every = 2", "every = 1")
    run = train(start, tmp_path / "run", each_step, "checkpoints.every=1", "steps=7", "optimizer.lr=1e-2")
    figures = [
        (e.fields["metrics"]["reward_mean"], -e.fields["version"])
        for e in events(run, "evaluated")
        if e.fields["name"] == "held-out"
    ]
    best = -max(figures)[1]
    assert best == 0 or best in run.versions()
    versions = [e.fields["version"] for e in events(run, "evaluated") if e.fields["best"]]
    assert best in versions
