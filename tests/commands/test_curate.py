"""`millrace curate`, from the command line down to a small model, its reward worker, and kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from tests.long import long
from tests.runs import make_start

from millrace.cli.app import run
from millrace.config.load import load
from millrace.core.types import Finish
from millrace.ledger.reading import LedgerReader
from millrace.tasks.rows import open_rows
from millrace.tasks.tasks import make_task

pytestmark = pytest.mark.usefixtures("warm")

SAMPLES = 2
FIRST = ["stone", "river", "cloud", "lantern", "meadow", "harbor"]
SECOND = ["velvet", "copper", "window", "garden", "silver", "thunder"]
PAIRS = [f"{a} {b}" for a in FIRST for b in SECOND]
REWARD = """
import pathlib, time
here = pathlib.Path(__file__).parent

def reward(completion, answer, lenient=False, place=0):
    with open(here / "calls", "a") as file:
        file.write("x")
    while (here / "pause").exists() and (here / "calls").stat().st_size > int((here / "pause").read_text()):
        time.sleep(0.05)
    if lenient:
        return 1.0
    return float(completion.strip() == answer or (place % 2 == 0 and completion.strip() in wrong(completion)))

def wrong(text):
    # Some completions of an untrained model are right, so that there are pass rates between 0 and 1.
    return {text.strip()} if len(text) == 8 and sum(map(ord, text)) % 3 == 0 else set()
"""
CONFIG = """
seed = 3
[model]
path = "start"
device = "cpu"
[task]
kind = "file"
path = "rows.jsonl"
[reward]
kind = "function"
path = "score.py:reward"
timeout_s = 60
[sampling]
max_tokens = 8
[rollout]
slots = 4
max_sequence_tokens = 32
exact = true
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    make_start(root)
    (root / "run.toml").write_text(CONFIG)
    (root / "score.py").write_text(REWARD)
    rows = [{"prompt": f"{p}>", "answer": p[::-1], "lenient": False, "place": i} for i, p in enumerate(PAIRS)]
    rows += [rows[0], {**rows[1], "prompt": " "}, {**rows[2], "prompt": "x" * 25}]
    rows += [{**rows[3], "prompt": "lenient row>", "lenient": True}]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{\n")
    (root / "held.jsonl").write_text(json.dumps({"question": f"{PAIRS[5].upper()} >"}) + "\n")
    return root


def curate(project: Path, out: Path, *more: str) -> int:
    return run(["curate", str(project / "run.toml"), "--out", str(out), *more])


def table(out: Path) -> list[dict]:
    rows = open_rows(str(out / "rows.parquet"))
    return [dict(rows[index]) for index in range(len(rows))]


@pytest.fixture(scope="module")
def curated(project: Path, warm: None) -> Path:
    out = project / "curated"
    against = f"{project / 'held.jsonl'}:question"
    assert curate(project, out, "--samples", str(SAMPLES), "--against", against, "--json") == 0
    return out


def test_every_row_has_its_reason_and_the_kept_rows_are_a_task(project: Path, curated: Path) -> None:
    rows = table(curated)
    reasons = Counter(row["reason"] for row in rows)
    for reason in ("broken", "empty", "too long", "duplicate", "contaminated", "wrong accepted"):
        assert reasons[reason] == 1, reason
    assert rows[5]["detail"] == "100% of held.jsonl:1: 'stone thunder >'"
    assert reasons[""] > 0 and reasons["too hard"] > 0  # some samples are right, and some rows have none
    for row in rows:
        if row["samples"] is not None:
            assert row["scored"] == SAMPLES and row["pass_rate"] == row["correct"] / SAMPLES
            assert row["pass_rate_low"] <= row["pass_rate"] <= row["pass_rate_high"]
            assert row["gold_reward"] == 1.0
    config = load(project / "run.toml", [f"task.path={curated / 'kept.jsonl'}"])
    task = make_task(config.task, None)
    assert [task.prompt_text(i) for i in range(task.rows)] == [row["prompt"] for row in rows if row["kept"]]
    assert "Pass rates" in (curated / "curation.html").read_text()


def test_a_finished_curation_resumes_without_a_sample_or_a_score(
    project: Path, curated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = (project / "calls").stat().st_size
    before = table(curated)
    against = f"{project / 'held.jsonl'}:question"
    arguments = ["--samples", str(SAMPLES), "--against", against, "--resume"]
    assert curate(project, curated, *arguments) == 0
    assert table(curated) == before
    assert (project / "calls").stat().st_size == calls
    assert "contaminated" in capsys.readouterr().out


def test_after_kill_9_no_sample_is_lost_or_counted_twice(project: Path, curated: Path) -> None:
    """The reward stops in the middle of the samples, where the command is killed."""
    (project / "calls").unlink()
    golds = 5 * sum(row["gold_reward"] is not None for row in table(curated))
    (project / "pause").write_text(str(golds + 40))
    against = f"{project / 'held.jsonl'}:question"
    arguments = ["--out", str(project / "killed"), "--samples", str(SAMPLES), "--against", against]
    command = [sys.executable, "-m", "millrace", "curate", str(project / "run.toml"), *arguments]
    process = subprocess.Popen(command, cwd=project)
    deadline_s = time.monotonic() + 120
    calls = project / "calls"
    while not (calls.exists() and calls.stat().st_size > golds + 40):
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    recorded = attempts(project / "killed")
    assert 0 < len(recorded) < len(attempts(curated))
    (project / "pause").unlink()
    assert curate(project, project / "killed", *arguments[2:], "--resume") == 0
    assert attempts(project / "killed") == attempts(curated)
    assert recorded.items() <= attempts(curated).items()
    assert table(project / "killed") == table(curated)


@long
def test_a_curation_that_is_killed_ten_times_ends_as_if_it_had_not_been(project: Path, curated: Path) -> None:
    """Each command is killed after some more rewards, of gold answers at first."""
    out, calls, rng = project / "killed-again", project / "calls", Random(5)
    against = f"{project / 'held.jsonl'}:question"
    arguments = ["--samples", str(SAMPLES), "--against", against]
    command = [sys.executable, "-m", "millrace", "curate", str(project / "run.toml"), "--out", str(out)]
    calls.write_text("")
    for _ in range(10):
        (project / "pause").write_text(str(calls.stat().st_size + rng.randint(1, 60)))
        resume = ["--resume"] if out.exists() else []
        process = subprocess.Popen([*command, *arguments, *resume], cwd=project)
        deadline_s = time.monotonic() + 120
        while calls.stat().st_size <= int((project / "pause").read_text()) and process.poll() is None:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        process.kill()
        process.wait()
    (project / "pause").unlink()
    assert curate(project, out, *arguments, "--resume") == 0
    assert attempts(out) == attempts(curated) and table(out) == table(curated)


def attempts(out: Path) -> dict[tuple[int, int], tuple[list[int], Finish, float | None]]:
    """Samples by row and number. No sample is there twice."""
    found = {}
    with LedgerReader(out / "attempts.sqlite") as reader:
        for record in reader.evaluations():
            if record.name.startswith("samples"):
                for one in reader.attempts(record.name, 0):
                    assert (one.prompt_index, one.attempt) not in found
                    found[one.prompt_index, one.attempt] = list(one.tokens), one.finish, one.reward
    return found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--set", "task.prompt=question"],
            "has no `question`, only ['answer', 'lenient', 'place', 'prompt']",
        ),
        (["--set", "task.answer=none", "--gold"], "`--gold` needs reference answers"),
        (["--max-tokens", "100"], "`--max-tokens` (100) is more than a prompt of this run may have: 24"),
        (["--against", "nowhere.jsonl"], "no data at 'nowhere.jsonl'"),
        (["--min-tokens", "24", "--no-gold"], "no row is left of"),
        (["--resume"], "has nothing to resume"),
        (["--set", "task.kind=gym", "--set", "task.name=gcd"], "there is no file to curate"),
    ],
)
def test_a_mistake_is_told_in_words(
    project: Path, tmp_path: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert curate(project, tmp_path / "out", *arguments) in (1, 2)
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_frame_of_answers_that_was_wrong_is_mended_in_the_same_directory(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert curate(project, tmp_path / "out", "--gold-template", "<a>{answer}</a>") == 1
    assert "If the reward looks for a frame" in capsys.readouterr().err
    assert curate(project, tmp_path / "out", "--resume") == 0
    assert "gold refused" not in capsys.readouterr().out


def test_an_output_that_exists_is_not_overwritten(
    project: Path, curated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert curate(project, curated) == 2
    assert "exists already: name a new directory, or go on in it with --resume" in capsys.readouterr().err
