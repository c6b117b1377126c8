"""A user's mistakes, made through the real command line: one clear message each, at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from failure_rows import seen
from tests.runs import make_start

from millrace.cli.app import run

WARM = '[model]\npath = "start"\nout = "warm"\ndevice = "cpu"\n[data]\npath = "demos.jsonl"\n'


class Case(NamedTuple):
    """`spoil` breaks a copy of a working project; `arguments` are then run in it."""

    row: str
    arguments: str
    code: int = 2
    spoil: Callable[[Path], object] = lambda project: None


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    project = tmp_path_factory.mktemp("sound")
    make_start(project)
    (project / "warm.toml").write_text(WARM)
    (project / "demos.jsonl").write_text('{"prompt": "ab>", "completion": "ba"}\n')
    rows = [{"prompt": f"{word}>", "answer": word[::-1]} for word in ("stone", "tree", "bread", "fire")]
    (project / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return project


pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture
def project(sound, tmp_path, monkeypatch):
    copied = shutil.copytree(sound, tmp_path / "project")
    monkeypatch.chdir(copied)
    return copied


def check(case, project, capsys):
    case.spoil(project)
    code = run(case.arguments.split(" "))
    message = capsys.readouterr().err
    assert code == case.code, message
    seen(case.row, message)


def ids(cases):
    return [case.row for case in cases]


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda project: (project / name).write_text(text)


def remove(name: str) -> Callable[[Path], object]:
    return lambda project: (project / name).unlink()


FILE_TASK = "--set task.kind=file --set task.path=rows.jsonl --set reward=exact"

CONFIGURATIONS = [
    Case("config-missing", "train nowhere.toml"),
    Case("config-not-toml", "train run.toml", spoil=write("run.toml", "steps = = 4")),
    Case("config-unknown-key", "train run.toml --set optimizer.learning_rate=1"),
    Case("config-wrong-type", "train run.toml --set steps=many"),
    Case("config-other-kind", "train run.toml --set schedule=laminar --set schedule.eta=2"),
    Case("config-unknown-kind", "train run.toml --set schedule=arael"),
    Case(
        "config-contradiction",
        "train run.toml --set schedule=rlax --set schedule.reload_staleness=3",
    ),
    Case("config-group-of-one", "train run.toml --set batch.group_size=1"),
    Case("config-no-room", "train run.toml --set sampling.max_tokens=32"),
    Case("config-greedy", "train run.toml --set sampling.temperature=0"),
    Case("config-reward-of-other-task", "train run.toml --set task.kind=file --set task.path=rows.jsonl"),
    Case("config-set-form", "train run.toml --set steps"),
    Case("config-one-slot", "train run.toml --set weights.slots=1"),
]

MACHINE = [
    Case("dir-used", "train run.toml --run-dir start"),
    Case("dir-is-file", "train run.toml --run-dir run.toml"),
    Case("dir-cannot-be-made", "train run.toml --run-dir /dev/null/run", code=1),
    Case("disk-too-small", "train run.toml --run-dir /proc/run"),
    Case("resume-nothing", "train run.toml --resume --run-dir elsewhere"),
]


@pytest.mark.parametrize("case", CONFIGURATIONS + MACHINE, ids=ids(CONFIGURATIONS + MACHINE))
def test_a_mistake_is_told_before_anything_starts(case, project, capsys):
    check(case, project, capsys)
    assert not list(project.glob("runs/*"))


def _config(**changes: object) -> Callable[[Path], object]:
    def change(project: Path) -> None:
        path = project / "start" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _weights(change: Callable[[dict], object]) -> Callable[[Path], object]:
    def apply(project: Path) -> None:
        from safetensors.torch import load_file, save_file

        path = project / "start" / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return apply


def _halve(project: Path) -> None:
    path = project / "start" / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


UP = "model.layers.1.mlp.up_proj.weight"

MODELS_BEFORE = [
    Case("model-missing", "train run.toml --set model.path=nowhere"),
    Case("model-no-config", "train run.toml", spoil=remove("start/config.json")),
    Case("model-broken-config", "train run.toml", code=1, spoil=write("start/config.json", "{")),
    Case("model-no-weights", "train run.toml", spoil=remove("start/model.safetensors")),
    Case("model-no-tokenizer", "train run.toml", spoil=remove("start/tokenizer.json")),
    Case("device-unknown", "train run.toml --set model.device=gpu7"),
    Case("adapter-no-such-layer", 'train run.toml --set adapter.rank=4 --set adapter.targets=["nowhere"]'),
]
MODELS_LOADED = [
    Case("model-unknown-architecture", "sft warm.toml", 1, _config(model_type="mamba9")),
    Case("model-truncated", "sft warm.toml", 1, _halve),
    Case("model-tensor-missing", "sft warm.toml", 1, _weights(lambda tensors: tensors.pop(UP))),
    Case("model-tensor-left-over", "sft warm.toml", 1, _weights(lambda t: t.update(odd=t[UP].clone()))),
    Case("model-not-finite", "sft warm.toml", 1, _weights(lambda tensors: tensors[UP].fill_(float("nan")))),
    Case("model-unsupported", "eval run.toml --prompts 1 --samples 1", 1, _config(model_type="gpt2")),
    Case("model-broken-tokenizer", "sft warm.toml", 1, write("start/tokenizer.json", "{}")),
    Case("device-missing", "sft warm.toml --set model.device=cuda:99"),
]


@pytest.mark.parametrize("case", MODELS_BEFORE, ids=ids(MODELS_BEFORE))
def test_a_model_directory_that_is_not_whole_is_told_before_anything_starts(case, project, capsys):
    check(case, project, capsys)


@pytest.mark.parametrize("case", MODELS_LOADED, ids=ids(MODELS_LOADED))
def test_a_model_that_cannot_be_trained_is_told_when_it_is_loaded(case, project, capsys):
    check(case, project, capsys)


DATA = [
    Case("data-missing", f"train run.toml {FILE_TASK}", spoil=remove("rows.jsonl")),
    Case("data-empty", f"try-task run.toml {FILE_TASK}", 1, write("rows.jsonl", "\n")),
    Case("data-all-broken", f"try-task run.toml {FILE_TASK}", 1, write("rows.jsonl", "{\n[]\n")),
    Case("data-wrong-column", f"try-task run.toml {FILE_TASK} --set task.prompt=text", 1),
    Case(
        "data-unknown-format",
        f"try-task run.toml {FILE_TASK.replace('rows.jsonl', 'rows.xml')}",
        1,
        write("rows.xml", "<rows/>"),
    ),
    Case("data-unknown-gym", "try-task run.toml --set task.name=chain_sums"),
]
FUNCTION = "--set reward.kind=function --set reward.path=score.py:reward"
REWARDS = [
    Case("reward-missing-file", f"train run.toml {FUNCTION}"),
    Case(
        "reward-broken-import",
        f"try-task run.toml {FUNCTION}",
        1,
        write("score.py", "import nowhere_at_all"),
    ),
    Case("reward-no-function", f"try-task run.toml {FUNCTION}", 1, write("score.py", "def score(): pass")),
    Case(
        "reward-unknown-column",
        f"try-task run.toml {FUNCTION}",
        1,
        write("score.py", "def reward(completion, colour): return 0.0"),
    ),
]


@pytest.mark.parametrize("case", DATA + REWARDS, ids=ids(DATA + REWARDS))
def test_data_and_rewards_that_cannot_be_used_at_all_are_told(case, project, capsys):
    check(case, project, capsys)
