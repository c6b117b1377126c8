"""Tutorials do what they say: both evenings in small sizes, the real model with a small one instead."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.long import long

from millrace.cli.app import run
from millrace.conversations.tokenizer import make_character_tokenizer

ROOT = Path(__file__).resolve().parents[2]
FIRST, _, EVENING = (
    (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8").partition("## The second evening")
)
SECOND = (ROOT / "docs" / "real.md").read_text(encoding="utf-8").partition("## A real model")[2]
FILES = ("rows.py", "reward.py", "codes.toml")
BLOCK = re.compile(r"```(?:python|toml)\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"^    ((?:millrace|python) .+)$", re.MULTILINE)
SMALLER = {"train": "--set steps=3 --set checkpoints.every=2", "eval": "--prompts 8 --samples 1"}

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture
def clone(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory as a clone is after the quickstart."""
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart" / "start").symlink_to(start.parent / "start")
    (tmp_path / "codes").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@long
def test_every_command_of_the_first_tutorial_runs_and_its_model_can_be_loaded(
    clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in zip(FILES, BLOCK.findall(FIRST), strict=True):
        (clone / "codes" / name).write_text(text)
    outputs = {}
    for line in COMMAND.findall(FIRST):
        program, *words = shlex.split(line)
        if program == "python":
            subprocess.run([sys.executable, *words], check=True, timeout=280)
        elif words[0] != "ui":  # it serves until it is interrupted; tests/browser has it
            code = run([*words, *shlex.split(SMALLER.get(words[0], ""))])
            assert code == 0 or words[0] == "doctor", line  # it finds that a random model earns nothing
            outputs[line] = capsys.readouterr().out
    assert [line for line in outputs if "--dry-run" in line and "First prompt" in outputs[line]]
    evaluations = [outputs[line] for line in outputs if " eval " in line]
    assert len(evaluations) == 2 and all("8 prompts" in text for text in evaluations)
    assert len((clone / "codes" / "held-out.jsonl").read_text().splitlines()) == 200
    page = (clone / "codes.html").read_text()
    assert page.count("<svg") > 5 and page.endswith("</html>\n")
    assert (clone / "models" / "codes" / "tokenizer.json").is_file()


@long
def test_every_command_of_the_second_evening_runs_after_the_first(
    clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = zip(
        ("rows.py", "rewards.py", "two.toml", "evening.toml"),
        [BLOCK.findall(FIRST)[0], *BLOCK.findall(EVENING)],
        strict=True,
    )
    for name, text in files:
        (clone / "codes" / name).write_text(text.replace("seeds = [1, 2, 3]", "seeds = [2]"))
    subprocess.run([sys.executable, "codes/rows.py"], check=True, timeout=280)
    few = "--set steps=3 --set batch.prompts=2 --set checkpoints.every=2"
    smaller = {"sweep": few, "train": few, "eval": "--prompts 8 --samples 1"}
    said = {}
    for line in COMMAND.findall(EVENING):
        words = shlex.split(line)[1:]
        if words[0] != "ui":
            code = run([*words, *shlex.split(smaller.get(words[0], ""))])
            assert code == 0 or words[0] == "doctor", line
            said[line] = capsys.readouterr().out
    assert "2 trials" in " ".join(next(text for line, text in said.items() if "--dry-run" in line).split())
    assert "lr=0.0006,seed=2: finished" in said["millrace sweep codes/evening.toml"]
    assert "began with" in next(
        text for line, text in said.items() if " compare " in line and "further" in line
    )


def test_the_held_out_rows_are_no_training_rows(clone: Path) -> None:
    (clone / "codes" / "rows.py").write_text(BLOCK.findall(FIRST)[0])
    subprocess.run([sys.executable, "codes/rows.py"], check=True, timeout=280)
    train, held_out = (
        {json.loads(line)["word"] for line in (clone / "codes" / name).read_text().splitlines()}
        for name in ("train.jsonl", "held-out.jsonl")
    )
    assert (len(train), len(held_out), train & held_out) == (1000, 200, set())


@pytest.fixture
def gsm8k(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the second tutorial fetches, as a small model of the family and rows of the form."""
    import pandas
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model, data = tmp_path / "models" / "Qwen2.5-0.5B-Instruct", tmp_path / "data" / "gsm8k" / "main"
    model.mkdir(parents=True)
    make_character_tokenizer(model, "".join(map(chr, range(32, 127))) + "\n")
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    Qwen2ForCausalLM(Qwen2Config(**size, **heads, tie_word_embeddings=True)).save_pretrained(model)
    data.mkdir(parents=True)
    rows = [
        {
            "question": f"What is {a}00 + {a}00?",
            "answer": f"It is <<{a}00+{a}00={a * 2}00>>.\n#### {a * 2:,}00",
        }
        for a in range(1, 40)
    ]
    for name in ("train", "test"):
        pandas.DataFrame(rows).to_parquet(data / f"{name}-00000-of-00001.parquet")
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "gsm8k.toml").write_bytes((ROOT / "examples" / "gsm8k.toml").read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


SIZES = {"steps": 1, "batch.prompts": 2, "batch.group_size": 2, "rollout.slots": 8, "sampling.max_tokens": 8}


@long
def test_the_second_tutorial_runs_on_a_small_model_but_for_its_fetches(
    gsm8k: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    smaller = [part for key, value in SIZES.items() for part in ("--set", f"{key}={value}")]
    outputs = []
    for line in COMMAND.findall(SECOND):
        words = shlex.split(line)[1:]
        if words[0] != "fetch":
            sizes = {"try-task": [], "show": [], "eval": [*smaller[2:], "--prompts", "4"]}
            assert run([*words, *sizes.get(words[0], smaller)]) == 0, line
            outputs.append(capsys.readouterr().out)
    dry, tried = outputs[:2]
    assert "final answer within" in dry and "Nothing was found that would keep this run from starting" in dry
    assert re.search(r"reference .* scored +1 ", tried)
