"""The task and reward of a run, tried in a process of their own before the run begins."""

from __future__ import annotations

import asyncio
import json
import string
from pathlib import Path

import pytest
from tests.unit.call_templates import FAMILIES, NO_CALLS

from millrace.checks.first_try import try_first, warnings
from millrace.cli import app
from millrace.config.freeze import dump
from millrace.config.schema import Config
from millrace.config.tables.task import FunctionTaskSection
from millrace.conversations.tokenizer import load_tokenizer, make_character_tokenizer
from millrace.core.errors import DataError, MillraceError, RewardError
from millrace.core.types import BadPrompt, Prompt, Scored
from millrace.episodes import first_look as looked

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_character_tokenizer(directory, "abcdefghijklmnopqrstuvwxyz >?")
    return directory


def config_for(model: Path, directory: Path, rows: list[object], reward: str, **sections: object) -> Config:
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "own.py").write_text(reward)
    timeout_s = 0.5 if "while True" in reward else 60.0
    return Config.model_validate(
        {
            "model": {"path": str(model)},
            "task": {"kind": "file", "path": str(directory / "rows.jsonl"), **sections.pop("task", {})},
            "reward": {"kind": "function", "path": f"{directory / 'own.py'}:reward", "timeout_s": timeout_s},
            **sections,
        }
    )


ROWS: list[object] = [{"prompt": f"{word}>", "answer": word[::-1]} for word in ("stone", "river", "maple")]
EQUAL = "def reward(completion, answer):\n    return {'reward': completion == answer, 'length': 3}\n"


def test_one_prompt_is_made_and_the_reward_called_on_a_right_answer(model: Path, tmp_path: Path) -> None:
    config = config_for(model, tmp_path, ROWS, EQUAL)
    first = try_first(config)
    assert first.task.prompt.text in {"stone>", "river>", "maple>"}
    [(attempt, timed)] = first.tried
    assert attempt.kind == "the reference answer"
    assert timed.score == Scored(1.0, {"length": 3.0})
    [warning] = warnings(config, first)
    assert "`batch.prompts` (8) prompts, and the task has 3 rows: each row comes 2.67 times" in warning


def test_rows_that_cannot_be_used_are_told_before_the_run(model: Path, tmp_path: Path) -> None:
    config = config_for(model, tmp_path, [*ROWS, {"prompt": ""}], EQUAL, batch={"prompts": 2})
    [warning] = warnings(config, try_first(config))
    assert warning.startswith("1 of the first 4 rows cannot be used")


TOOLS = """
class reward:
    def reset(self, **row):
        self.reward = 0.0

    def look(self, city: str) -> str:
        \'\'\'Look.

        Args:
            city: where
        \'\'\'
        return city
"""
GAME = """
from millrace import Done

class reward:
    def reset(self, row):
        pass

    def step(self, action):
        return Done(1.0)
"""


@pytest.mark.parametrize(
    ("template", "environment", "noted"),
    [(NO_CALLS, TOOLS, True), (NO_CALLS, GAME, False), (FAMILIES["Llama 3.1"], TOOLS, False)],
    ids=["no calls", "no tools", "calls"],
)
def test_calls_that_are_read_by_known_marks_are_told_before_the_run(
    tmp_path: Path, template: str, environment: str, noted: bool
) -> None:
    make_character_tokenizer(tmp_path / "model", string.printable)
    made = load_tokenizer(tmp_path / "model")
    made.chat_template = template
    made.save_pretrained(tmp_path / "model")
    rows: list[object] = [{"prompt": [{"role": "user", "content": word}], "answer": word} for word in "ab"]
    more = {"batch": {"prompts": 2}, "rollout": {"max_sequence_tokens": 4000}}
    config = config_for(tmp_path / "model", tmp_path, rows, environment, **more)
    kind = {"kind": "environment", "path": f"{tmp_path / 'own.py'}:reward"}
    config = Config.model_validate({**dump(config), "reward": kind})
    told = "".join(warnings(config, try_first(config)))
    assert ("shows tools and writes no calls: a call counts if" in told) == noted


@pytest.mark.parametrize(
    ("reward", "error", "says"),
    [
        ("def other(): pass", RewardError, "has no `reward`; it has other"),
        ("import no_such_module", RewardError, "no_such_module"),
        ("def reward(completion, level): pass", RewardError, "needs `level`"),
        ("def reward(completion):\n    return missing", RewardError, "NameError.*missing"),
        ("def reward(completion):\n    return 'good'", RewardError, "'good'"),
        ("def reward(completion):\n    while True: pass", RewardError, "did not answer within 0.5 s"),
        ("import os\ndef reward(completion):\n    os._exit(3)", RewardError, "ended its process"),
    ],
)
def test_a_reward_that_cannot_work_is_found_before_the_run(
    model: Path, tmp_path: Path, reward: str, error: type[MillraceError], says: str
) -> None:
    with pytest.raises(error, match=f"(?s){says}"):
        try_first(config_for(model, tmp_path, ROWS, reward))


def test_a_reward_that_fails_on_some_texts_is_warned_of(model: Path, tmp_path: Path) -> None:
    picky = "def reward(completion, answer):\n    assert completion != answer\n    return 0\n"
    config = config_for(model, tmp_path, ROWS, picky, batch={"prompts": 2})
    [warning] = warnings(config, try_first(config))
    assert "the reward fails on the reference answer" in warning


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"task": {"prompt": "question"}}, "has no `question`"),
        ({"task": {"template": "{level}"}}, "KeyError: 'level'"),
        ({"task": {"template": "{prompt!x}"}}, "cannot be filled"),
        (
            {"rollout": {"max_sequence_tokens": 18}, "sampling": {"max_tokens": 16}},
            "has 6 tokens, there is room for 2",
        ),
    ],
)
def test_a_task_without_a_usable_prompt_is_found_before_the_run(
    model: Path, tmp_path: Path, sections: dict[str, object], says: str
) -> None:
    with pytest.raises(DataError, match=says):
        try_first(config_for(model, tmp_path, ROWS, EQUAL, **sections))


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_train_finds_it_without_a_run_directory(
    start: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["train", str(start), "--set", "task.template={question", *more]
    assert app.run(arguments) == 1
    assert "cannot be filled" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_shows_the_first_prompt_and_what_the_reward_says(
    start: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["train", str(start), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "First prompt" in said
    assert "spell_backward/1:" in said
    assert "the reference answer  1, in" in said


def test_a_dry_run_says_what_of_the_algorithm_changes_nothing(
    start: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--set", "algorithm.kind=gspo", "--dry-run"]
    assert app.run(["train", str(start), *more]) == 0
    assert 'Note: `algorithm.ratio` ("sequence") ch' in capsys.readouterr().err
    assert app.run(["train", str(start), *more, "--set", "batch.minibatches=2"]) == 0
    assert "Note:" not in capsys.readouterr().err


def test_an_answer_of_megabytes_costs_no_more_than_a_completion(model: Path, tmp_path: Path) -> None:
    """A run never makes tokens of an answer, so hidden tests of a program may be one."""
    rows: list[object] = [{"prompt": "stone>", "answer": "enots" * 1_000_000}]
    own = config_for(model, tmp_path, rows, EQUAL)
    config = own.model_copy(update={"reward": own.reward.model_copy(update={"memory_mb": 256})})
    [(attempt, timed)] = try_first(config).tried
    assert attempt.kind == "the reference answer" and len(attempt.tokens) == config.sampling.max_tokens
    assert timed.score == Scored(0.0, {"length": 3.0})


def test_rows_that_are_made_slowly_are_looked_at_for_a_while_only(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looked, "LOOK_S", 0.0)
    config = config_for(model, tmp_path, [{"prompt": ""}, *ROWS], EQUAL)
    worker = looked.FirstLook(dump(config), limit_memory=False)

    async def probed() -> list[Prompt | BadPrompt]:
        return [prompt async for prompt in worker.probed(0, any_usable=False)]

    *unusable, usable = asyncio.run(probed())
    assert isinstance(usable, Prompt) and all(isinstance(prompt, BadPrompt) for prompt in unusable)


KILLER = """
import os

class Rows(list):
    def __getitem__(self, index):
        row = super().__getitem__(index)
        if row["killer"]:
            os._exit(3)
        return row

def rows():
    return Rows({{"prompt": f"{{n}}>", "answer": "x", "killer": n in {killers}}} for n in range(8))

def reward(completion, answer, killer):
    return 1
"""


@pytest.mark.parametrize(
    ("killers", "says"), [((5,), ""), ((4, 5), "second row"), ((0,), "first usable row")]
)
def test_a_row_that_costs_its_worker_is_told_and_skipped_and_a_second_is_refused(
    model: Path, tmp_path: Path, killers: tuple[int, ...], says: str
) -> None:
    own = tmp_path / "own.py"
    task = {"kind": "function", "path": f"{own}:rows"}
    config = config_for(model, tmp_path, ROWS, KILLER.format(killers=killers), batch={"prompts": 2})
    config = config.model_copy(update={"task": FunctionTaskSection.model_validate(task)})
    if says:
        with pytest.raises(DataError, match=says):
            try_first(config)
    else:
        [warning] = warnings(config, try_first(config))
        assert (
            warning.startswith("1 of the first 8 rows cannot be used") and "own.py:rows:5: making" in warning
        )


def test_a_row_whose_scoring_costs_its_worker_is_told_and_another_is_tried(
    model: Path, tmp_path: Path
) -> None:
    first = try_first(config_for(model, tmp_path, ROWS, EQUAL)).task.prompt.text
    deadly = (
        f"import os\ndef reward(completion, prompt):\n    prompt == {first!r} and os._exit(3)\n    return 1\n"
    )
    config = config_for(model, tmp_path, ROWS, deadly, batch={"prompts": 2})
    [warning] = warnings(config, try_first(config))
    assert "the reward fails on the reference answer: the reward ended its process" in warning
    assert warning.startswith("rows.jsonl:") and "ends as failed, and is counted" in warning


def test_an_answer_with_half_a_character_keeps_no_run_from_starting(model: Path, tmp_path: Path) -> None:
    first = try_first(config_for(model, tmp_path, [{"prompt": "stone>", "answer": "\ud800"}], EQUAL))
    assert isinstance(first.tried[-1][1].score, Scored)


def test_every_part_of_a_mixture_is_tried(model: Path, tmp_path: Path) -> None:
    config = config_for(model, tmp_path, ROWS, EQUAL)
    (tmp_path / "broken.py").write_text("def reward(completion):\n    return missing\n")
    parts = [
        {"name": name, "weight": weight, "task": config.task.model_dump()}
        for name, weight in (("whole", 999), ("rare", 1))
    ]
    parts[1]["reward"] = {"kind": "function", "path": f"{tmp_path / 'broken.py'}:reward"}
    mixture = {"kind": "mixture", "parts": parts}
    mixed = Config.model_validate(config.model_dump() | {"task": mixture})
    with pytest.raises(RewardError, match=r"`task.parts` \(rare\): the reward fails at every call"):
        try_first(mixed)
