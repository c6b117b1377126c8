"""Evaluations and curations play whole episodes, in real processes that are killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.long import long
from tests.runs import events, train, weights
from tests.turn_runs import make_start

import millrace
from conformance import WAIT_S
from millrace.cli.app import run as main
from millrace.config.load import load
from millrace.conversations.tokenizer import load_tokenizer
from millrace.core.completion.marked import unmarked
from millrace.core.types import EvaluationAttempt, Finish
from millrace.evaluation.evaluate import evaluate
from millrace.ledger.reading import LedgerReader
from millrace.run_directory.run_directory import RunDirectory
from millrace_curation.curate import CurationOptions, curate

pytestmark = pytest.mark.usefixtures("warm")
NAME, PROMPTS, SAMPLES = "held-out", 5, 2


@pytest.fixture
def turns(tmp_path: Path) -> Path:
    return make_start(tmp_path)


def evaluation(directory: Path, every: int = 2) -> str:
    task = f'{{ kind = "function", path = "{directory}/acting.py:rows", answer = "none" }}'
    keys = f"prompts = {PROMPTS}, samples = {SAMPLES}, correct_at = 1.5, by = 'reward', task = {task}"
    return f'evaluations=[{{ name = "{NAME}", every = {every}, {keys} }}]'


def attempts(run: RunDirectory, version: int) -> list[EvaluationAttempt]:
    with LedgerReader(run.ledger) as reader:
        found = reader.attempts(NAME, version)
    assert len(found) == PROMPTS * (1 + SAMPLES)
    return found


def check_episodes(found: list[EvaluationAttempt], directory: Path) -> None:
    """Each is what the environment heard and said, to the end."""
    tokenizer = load_tokenizer(directory / "start")
    exchanges = {tuple(json.loads(line)) for line in (directory / "exchanges").read_text().splitlines()}
    lengths = set()
    for one in found:
        columns = unmarked(one.tokens, 0)
        texts = [
            tokenizer.decode(columns.tokens[start:stop].tolist(), skip_special_tokens=True)
            for start, stop, _ in columns.turns()
        ]
        assert one.reward is not None
        answers = texts[1::2]
        if one.finish is Finish.STOP:
            lengths.add(len(answers) + 1)
            answers += [""]
        assert set(zip(texts[::2], answers, strict=False)) <= exchanges
    assert lengths == {3, 4}  # as the environment ends them


@long
def test_an_evaluation_of_episodes_survives_the_death_of_its_processes(turns, tmp_path, capsys):
    pids, killed = dict[str, int](), list[str]()

    def kill(event):
        if event.kind == "worker_started":
            pids[event.fields["name"]] = event.fields["pid"]
        due = {"computes": "evaluator", "step": f"reward-worker-{NAME}"}.get(event.kind)
        if due in pids and due not in killed and event.fields.get("name", due) == due:
            killed.append(due)
            os.kill(pids[due], signal.SIGKILL)

    calm = train(turns, tmp_path / "calm")
    run = train(turns, tmp_path / "run", evaluation(tmp_path), sinks=(kill,))
    assert sorted(killed) == ["evaluator", f"reward-worker-{NAME}"]
    assert {event.fields["name"] for event in events(run, "worker_died")} == set(killed)
    assert weights(run) == weights(calm)
    (metrics,) = [
        event.fields["metrics"] for event in events(run, "evaluated") if event.fields["version"] == 4
    ]
    check_episodes(attempts(run, 4), tmp_path)
    assert (
        metrics["num_unscored"] == 0
        and set(metrics["pass_at_k"]) == {"1", "2"}
        and not metrics["majority_at_k"]
    )
    newest = millrace.Run(run.path).evaluations(completions=True)[-1]
    shown = [one for one in newest["completions"] if one["finish"] == "stop"]
    assert {len(one["turns"]) for one in shown} == {5, 7}
    assert [turn["role"] for turn in shown[0]["turns"][:2]] == ["model", "environment"]
    assert shown[0]["turns"][0]["versions"] == [4] and not shown[0]["turns"][1]["versions"]
    assert main(["show", str(run.path), "--evaluation", NAME]) == 0
    assert "environment 2: 3 tokens, observed" in capsys.readouterr().out
    # The same episodes outside the run: the model that it wrote, the same rows, greedy.
    config = load(turns, [f"model.path={run.model}"])
    outside = evaluate(config, prompts=PROMPTS, samples=SAMPLES, correct_at=1.5)
    assert outside.greedy_accuracy == metrics["greedy_accuracy"]
    assert outside.num_unscored == 0 and set(outside.pass_at_k) == {1, 2} and outside.majority_at_k == {}


@long
def test_a_controller_killed_while_episodes_are_evaluated_resumes_and_evaluates_once(turns, tmp_path):
    run, kills = RunDirectory(tmp_path / "run"), 0
    at = sorted(random.Random(5).sample(range(1, 120), 3))
    (tmp_path / "points").write_text(json.dumps({"what": "controller", "at": at}))
    command = [sys.executable, "-m", "millrace", "train", str(turns), "--run-dir", str(run.path)]
    command += ["--set", evaluation(tmp_path, every=1)]
    while True:
        resume = ["--resume"] if run.path.exists() else []
        with subprocess.Popen([*command, *resume], stdout=subprocess.DEVNULL) as controller:
            (tmp_path / "controller").write_text(str(controller.pid))
            code = controller.wait(WAIT_S)
        if code != -signal.SIGKILL:
            break
        kills += 1
    assert code == 0 and 1 <= kills <= len(at)
    with LedgerReader(run.ledger) as reader:
        records = reader.evaluations()
    assert sorted(one.version for one in records) == list(range(5))
    check_episodes(attempts(run, 4), tmp_path)


def test_an_environment_that_fails_leaves_its_episodes_without_a_reward(turns, tmp_path):
    failing = (tmp_path / "acting.py").read_text() + (
        "\n\nclass Failing(Acting):\n    def step(self, action):\n"
        "        if self.number % 2:\n            raise RuntimeError('no answer')\n"
        "        return super().step(action)\n"
    )
    (tmp_path / "acting.py").write_text(failing)
    config = load(turns, [f"reward.path={tmp_path}/acting.py:Failing"])
    result = evaluate(config, prompts=8, samples=SAMPLES, correct_at=0.0)
    assert result.num_unscored == 4 * (1 + SAMPLES)
    assert result.greedy_accuracy == result.sampled_accuracy == 1.0


def test_pass_rates_of_a_curation_are_over_episodes(turns, tmp_path):
    config, ledger = load(turns, []), tmp_path / "attempts.sqlite"
    options = CurationOptions(samples=SAMPLES, correct_at=1.5, keep_hard=True, keep_easy=True, near=None)
    curation = curate(config, options, ledger)
    assert len(curation.rates) == 8 and all(rate.scored == SAMPLES for rate in curation.rates.values())
    with LedgerReader(ledger) as reader:
        found = [one for record in reader.evaluations() for one in reader.attempts(record.name, 0)]
    check_episodes(found, tmp_path)
    answers = (tmp_path / "answers").stat().st_size
    assert curate(config, options, ledger).rates == curation.rates
    assert (tmp_path / "answers").stat().st_size == answers  # nothing is played again
