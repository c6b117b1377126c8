"""The commands, from the command line down to real processes and a real small model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import ANY

import pytest

from millrace.cli.app import run
from millrace.config.load import load
from millrace.conversations.tokenizer import make_character_tokenizer
from millrace.core.completion.columns import token_array
from millrace.core.errors import DataError
from millrace.core.types import Accounting, Finish, Group, State, StepRecord, Trajectory
from millrace.evaluation.trials import judge
from millrace.ledger.reading import LedgerReader
from millrace.ledger.sqlite import SqliteLedger
from millrace.observe.sinks.jsonl import read_events
from millrace.run.interrupt import INTERRUPTED
from millrace.run_directory.run_directory import RunDirectory
from millrace.sft.warm_start import read_examples

ALPHABET = "0123456789+-*/=()?.,: abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ\n"
DATA = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]


pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: a model, a data file, a reward in a file of its own, two configurations."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    root = tmp_path_factory.mktemp("project")
    make_character_tokenizer(root / "model", ALPHABET)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(ALPHABET) + 5, eos_token_id=1, **size, **heads))
    model.save_pretrained(root / "model")
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in DATA))
    demonstrations = [{"prompt": row["prompt"], "completion": row["answer"]} for row in DATA]
    (root / "demonstrations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in demonstrations))
    (root / "score.py").write_text(
        "import time\n"
        "def reward(completion, answer, **columns):\n"
        "    if 'lorem' in completion:\n"
        "        raise ValueError('no latin')\n"
        "    if completion == 'hang':\n"
        "        time.sleep(60)\n"
        "    return {'reward': float(completion.strip() == answer), 'length': len(completion)}\n"
    )
    (root / "run.toml").write_text(
        'steps = 3\n[model]\npath = "model"\n[task]\nkind = "file"\npath = "rows.jsonl"\n'
        '[reward]\nkind = "function"\npath = "score.py:reward"\ntimeout_s = 3.0\n'
        "[sampling]\nmax_tokens = 4\n[rollout]\nslots = 8\nmax_sequence_tokens = 32\n"
    )
    (root / "warm.toml").write_text(
        "steps = 4\nlr = 1e-3\nbatch_tokens = 256\n"
        '[model]\npath = "model"\nout = "warm"\n[data]\npath = "demonstrations.jsonl"\n'
    )
    return root


def test_a_warm_start_is_saved_and_not_overwritten(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sft", str(project / "warm.toml")]) == 0
    assert "loss" in capsys.readouterr().err
    assert (project / "warm" / "tokenizer.json").is_file()
    assert run(["sft", str(project / "warm.toml")]) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_reward_is_tried_and_its_failures_are_told(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["-n", "2", "--completion", "hang", "--completion", "99", "--completion", "9€"]
    assert run(["try-task", str(project / "run.toml"), *arguments, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    outcomes = {(trial["kind"], trial["completion"]): trial for trial in report["trials"]}
    assert len(report["trials"]) == 12
    assert all(t["value"] == 1.0 for t in report["trials"] if t["kind"] == "reference")
    assert outcomes["empty", ""]["value"] == 0.0
    assert outcomes["yours", "99"]["metrics"] == {"length": 2.0}
    garbage = next(t for t in report["trials"] if t["kind"] == "garbage")
    assert garbage["outcome"] == "failed"
    assert "no latin" in garbage["reason"]
    assert "did not answer within 3 s" in outcomes["yours", "hang"]["reason"]
    assert "4 of 12 calls failed" in report["warnings"][0]
    assert "the tokenizer cannot write '9€': the reward gets '9'" in report["warnings"]


def test_a_reward_of_which_every_call_fails_is_not_blamed_for_being_constant() -> None:
    text = {"completion": "5", "seen": "5"}
    failed = {**text, "kind": "reference", "outcome": "failed", "reason": "no latin", "value": None}
    assert list(judge([failed, failed])) == ["2 of 2 calls failed, the first: no latin"]
    abstained = {**text, "kind": "reference", "outcome": "abstain", "reason": "", "value": None}
    assert list(judge([abstained, abstained])) == [
        "every completion gets no opinion: nothing can be learned from that"
    ]


def test_a_task_without_answers_is_not_blamed_for_wrong_ones_that_earn_nothing() -> None:
    wrong = [{"kind": kind, "outcome": "scored", "reason": "", "value": 0.0} for kind in ("empty", "garbage")]
    assert [text for text in judge(wrong) if "--completion TEXT" not in text] == []


@pytest.mark.parametrize(
    ("line", "said"),
    [("{", "is not JSON"), ('{"prompt": "a"}', "this has ['prompt']"), ("[1]", "1 is a JSON list")],
)
def test_a_demonstration_that_is_none_is_named(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "rows.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match=re.escape(said)):
        read_examples(tmp_path / "rows.jsonl", None, append_eos=False)


def test_an_evaluation_counts_every_completion(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prompts", "5", "--samples", "4", "--json"]
    assert run(["eval", str(project / "run.toml"), *arguments]) == 0
    first = json.loads(capsys.readouterr().out)
    assert (first["num_prompts"], first["num_samples"]) == (5, 4)
    assert set(first["pass_at_k"]) == {"1", "2", "4"}
    assert 0 <= first["sampled_accuracy"] <= first["pass_at_k"]["4"] <= 1
    assert run(["eval", str(project / "run.toml"), *arguments]) == 0
    assert json.loads(capsys.readouterr().out) == first


def test_an_evaluation_asks_every_row_of_a_file_once(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["eval", str(project / "run.toml"), "--prompts", "60", "--samples", "1"]) == 0
    text = capsys.readouterr().out
    assert f"{len(DATA)} prompts" in text
    assert "rows that training draws from" in text and "--set task.path=OTHER_FILE" in text
    named = ["--set", f"task.path={project / 'rows.jsonl'}", "--prompts", "2", "--samples", "1"]
    assert run(["eval", str(project / "run.toml"), *named]) == 0
    assert "rows that training draws from" not in capsys.readouterr().out


def test_a_dry_run_says_what_every_preset_would_do_and_leaves_nothing(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for kind in ("synchronous", "llamarl", "areal", "laminar", "rlax"):
        assert run(["train", str(project / "run.toml"), "--set", f"schedule={kind}", "--dry-run"]) == 0
        said = capsys.readouterr().out
        assert f'kind = "{kind}"' in said
        assert "8 prompts x 8 = 64" in said
        assert "one version" in said
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_shown_from_its_ledger(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = RunDirectory(project / "run")
    directory.path.mkdir()
    directory.write_config(load(project / "run.toml"))
    write_ledger(directory)
    assert run(["show", str(directory.path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["version"] == 1
    assert shown["accounting"]["trained"] == 2
    assert shown["replicas"][0]["replica"] == "replica-0"
    assert shown["state"].startswith("stopped")
    assert shown["window"] == {"batches": 0, "staleness_mean": None, "fairness": None, "next": None}
    assert run(["show", str(directory.path), "--trajectory", "1", "--json"]) == 0
    trajectory = json.loads(capsys.readouterr().out)
    assert trajectory["prompt"] == "1+1="
    assert trajectory["tokens"][1]["version"] == 0
    assert trajectory["tokens"][0]["logprob"] == pytest.approx(-0.5)
    assert trajectory["tokens"][1]["top_logprobs"][1] == {"token": 2, "text": ANY, "logprob": -2.5}
    assert run(["show", str(directory.path), "--step", "1", "--json"]) == 0
    step = json.loads(capsys.readouterr().out)
    assert step["reward_mean"] == 0.5
    assert step["metrics"]["loss"] == 0.25
    assert run(["show", str(directory.path), "--best", "--samples", "1", "--json"]) == 0
    (best,) = json.loads(capsys.readouterr().out)
    assert (best["trajectory_id"], best["prompt"], best["versions"]) == (1, "1+1=", [0])
    for arguments, words in (
        ([], ("in flight", "reward mean", "moved or resumed", "figures from 16 batches")),
        (["--step", "1"], ("reward mean", "trajectory", "ended by")),
        (["--trajectory", "0"], ("row", "log-prob", "trained into version", "-1.5")),
        (["--samples", "1"], ("trajectory 1, reward 1, trained in step 1", "prompt", "1+1=", "completion")),
        (["--worst"], ("trajectory 0, reward 0", "trajectory 1, reward 1")),
        (["--failed"], ("none yet",)),
    ):
        assert run(["show", str(directory.path), *arguments]) == 0
        shown = capsys.readouterr().out
        assert all(word in shown for word in words)
        assert "_" not in shown.replace(str(directory.path), "")
    window = {"batches": 20, "staleness_mean": 1.5, "fairness": 2.25, "next": -0.75}
    line = {"kind": "step", "time_s": 1.0, "wall_s": 1.0, "window": window}
    directory.events.write_text(json.dumps(line, separators=(",", ":")) + "\n")
    assert run(["show", str(directory.path)]) == 0
    shown = capsys.readouterr().out
    for words in (
        "The last 20 batches",
        "mean staleness",
        "1.5",
        "fairness (1: fair samples",
        "2.25",
        "-0.75",
    ):
        assert words in shown
    assert run(["show", str(directory.path), "--step", "9"]) == 1
    assert "there is no step 9" in capsys.readouterr().err


def write_ledger(directory: RunDirectory) -> None:
    """One group of two, trained in step 1."""
    members = [Trajectory(i, 0, replica="replica-0", epoch=1, lease=1) for i in range(2)]
    ledger = SqliteLedger(directory.ledger, run={})
    ledger.admit([Group(0, "rows:1", token_array([1, 2]), "1+1=", members)])
    for member in members:
        member.state, member.finish, member.reward = State.BUFFERED, Finish.STOP, float(member.trajectory_id)
        member.columns.append(7, -0.5, 0, ([7, 9], [-0.5, -1.5]))
        member.columns.append(1, -0.1, 0, ([1, 2], [-0.1, -2.5]))
    ledger.update(members)
    ledger.flush()
    ledger.commit_step(StepRecord(1, [0], [0, 1], {"loss": 0.25}))
    assert ledger.flush() == Accounting(admitted=2, trained=2)
    ledger.close()


def test_a_run_is_stopped_by_a_signal_and_resumed_to_its_end(project: Path, tmp_path: Path) -> None:
    """It saves what it has, says how to go on, and nothing is lost or trained twice."""
    directory = RunDirectory(tmp_path / "run")
    command = [sys.executable, "-m", "millrace"]
    arguments = ["train", str(project / "run.toml"), "--run-dir", str(directory.path), "--set"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, *arguments, "steps=100000"], stderr=subprocess.PIPE, text=True, env=environment
    ) as first:
        wait_for_steps(directory, first)
        first.send_signal(signal.SIGINT)
        _, said = first.communicate(timeout=280)
    assert first.returncode == INTERRUPTED, said
    assert "--resume" in said
    with LedgerReader(directory.ledger) as reader:
        stopped = reader.overview()
    assert stopped.checkpoint is not None
    assert stopped.checkpoint.version == stopped.version
    again = [*command, *arguments, f"steps={stopped.version + 2}", "--resume"]
    with (project / "score.py").open("a") as file:
        file.write("# Other code\n")
    process = subprocess.run(again, check=True, timeout=280, env=environment, capture_output=True, text=True)
    assert "reward.path: its file has changed" in process.stdout + process.stderr
    with LedgerReader(directory.ledger) as reader:
        done, trained = reader.overview(), [i for step in reader.steps() for i in step.trajectory_ids]
    assert done.version == stopped.version + 2
    assert done.accounting.balanced
    assert len(trained) == len(set(trained)) == done.accounting.trained
    assert (directory.model / "model.safetensors").is_file()
    events = list(read_events(directory.events))
    assert [event.wall_s for event in events] == sorted(event.wall_s for event in events)
    assert [event.fields["source"] for event in events if event.kind == "warned"] == ["reward.path"]
    process = subprocess.run(again, check=True, timeout=280, env=environment, capture_output=True, text=True)
    assert f"All {done.version} steps are done" in process.stderr
    assert len(list(read_events(directory.events))) == len(events)


def wait_for_steps(directory: RunDirectory, process: subprocess.Popen[str]) -> None:
    """Until the first steps are in the metrics file, or the process ended."""
    deadline_s = time.monotonic() + 200
    while process.poll() is None and time.monotonic() < deadline_s:
        if directory.metrics.exists() and directory.metrics.read_text().count("\n") >= 2:
            return
        time.sleep(0.1)
    process.kill()
    raise AssertionError(process.communicate()[1])
