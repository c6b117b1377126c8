"""Runs whose judge is slow, fails, hangs up and talks nonsense end with their accounts closed."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing

import pytest
from tests.long import long
from tests.runs import events, summary, train

import millrace
from conformance import WAIT_S
from judge_double import judging
from millrace.ledger.reading import LedgerReader
from millrace.rewards.judge import FILE, key_of
from millrace.run_directory.run_directory import RunDirectory

FAULTS = (500, "close", 429, "I would say nine of ten.", {"message": {"content": None, "refusal": "No."}})


def number(body):
    return int(hashlib.sha256(json.dumps(body).encode()).hexdigest(), 16)


def says(body, asked):
    """A fault of each kind first for most questions, and for one in six of them always."""
    time.sleep(0.01 * (number(body) % 5))
    if number(body) % 6 == 0:
        return FAULTS[(number(body) + asked) % len(FAULTS)]
    return "Well.\nSCORE: 7" if asked or number(body) % 2 else FAULTS[number(body) % len(FAULTS)]


pytestmark = pytest.mark.usefixtures("warm")


def reward(judge):
    return (
        f"{{kind='judge', url='{judge.url}', model='m', rubric='Good?', attempts=3, "
        "backoff_s=0.01, request_timeout_s=10.0, asked_twice=0.2, workers=2}"
    )


def check(run):
    """Its accounts are closed, each reward is what the judge gives, and each failure has its reason."""
    accounting = summary(run)["accounting"]
    ended = sum(accounting[name] for name in ("trained", "failed", "rejected", "stale", "abandoned"))
    assert accounting["admitted"] == ended + accounting["in_flight"] and accounting["failed"] > 0
    with LedgerReader(run.ledger) as reader:
        members = [one for group in reader.groups() for one in group.members]
        reasons = reader.reasons()
    rewards = [one.reward for one in members if one.reward is not None]
    assert rewards == pytest.approx([2 / 3] * len(rewards)) and rewards
    failures = {reason: count for (state, reason), count in reasons.items() if state == "failed"}
    assert sum(failures.values()) == accounting["failed"]
    assert all("no judgement after 3 attempts" in reason for reason in failures)


def test_a_run_with_a_flaky_judge_closes_its_accounts_and_no_failure_is_a_zero(start, tmp_path):
    with judging(says) as judge:
        run = train(start, tmp_path / "run", f"reward={reward(judge)}")
    check(run)
    assert (run.path / FILE).exists()


def kept(run):
    with closing(sqlite3.connect(run.path / FILE)) as database:
        return {key for (key,) in database.execute("SELECT key FROM judgements")}


@long
@pytest.mark.parametrize("again", [[], ["--from-version", "2"]], ids=["resumed", "from an earlier version"])
def test_a_run_that_is_killed_and_resumed_pays_for_no_judgement_twice(again, start, tmp_path):
    """Each completion is graded twice. The kill comes in the last step, between the two."""
    run, paused, killed = RunDirectory(tmp_path / "run"), threading.Event(), threading.Event()

    def graded(_, asked):
        if paused.is_set() or (asked and run.events.exists() and len(events(run, "step")) >= 3):
            paused.set()
            killed.wait(WAIT_S)
            return "close"
        return "SCORE: 7"

    def command(judge):
        sets = ["--set", f"reward={reward(judge).replace('asked_twice=0.2', 'asked_twice=1.0')}"]
        return [sys.executable, "-m", "millrace", "train", str(start), "--run-dir", str(run.path), *sets]

    with judging(graded) as judge, subprocess.Popen(command(judge), stdout=subprocess.DEVNULL) as controller:
        assert paused.wait(WAIT_S)
        controller.kill()
        before = kept(run)
        killed.set()
    with judging(lambda *_: "SCORE: 7") as judge:
        resume = [*command(judge), "--resume", *again]
        subprocess.run(resume, check=True, timeout=WAIT_S, stdout=subprocess.DEVNULL)
    later = Counter(json.dumps(body) for body in judge.requests)
    assert before and later
    for body, count in later.items():
        assert count <= sum(key_of(json.loads(body), asking) not in before for asking in (0, 1))
    accounting = summary(run)["accounting"]
    assert accounting["failed"] == accounting["in_flight"] == 0
    if not again:  # an earlier version has undone the groups of the last step
        assert any(one.get("reward/judge_requests") == 0 for one in millrace.Run(run.path).trajectories())


SUM = """reward={{kind='sum', timeout_s=30.0, members=[
{{name='judged', weight=1.0, reward={judge}}},
{{name='letters', weight=0.25, reward={{kind='pattern', pattern='[a-z]*'}}}},
{{name='long', weight=-0.5, reward={{kind='pattern', pattern='.{{8,}}'}}}}]}}"""


def test_each_part_of_a_sum_is_a_metric_of_each_step_and_in_the_report(start, tmp_path):
    with judging(lambda body, _: f"SCORE: {1 + number(body) % 10}") as judge:
        member = reward(judge).replace(", workers=2", "")
        run = train(start, tmp_path / "run", SUM.format(judge=member).replace("\n", " "))
    view = millrace.Run(run.path)
    weights = {"judged": 1.0, "letters": 0.25, "long": -0.5}
    for step in view.metrics():
        parts = sum(weight * step[f"reward_metrics/{name}"] for name, weight in weights.items())
        assert step["reward/mean"] == pytest.approx(parts)
        assert step["reward_metrics/judged/judge_requests"] <= 1
    for one in view.trajectories():
        parts = sum(weight * one[f"reward/{name}"] for name, weight in weights.items())
        assert one["reward"] == pytest.approx(parts)
    out = tmp_path / "report.html"
    write = [sys.executable, "-m", "millrace", "report", str(run.path), "--out", str(out)]
    subprocess.run(write, check=True, timeout=WAIT_S, stdout=subprocess.DEVNULL)
    assert all(name in out.read_text() for name in weights)
