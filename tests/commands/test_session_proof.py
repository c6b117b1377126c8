"""Reference answers of the first rows are scored before a run. One without full marks is named, by row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.checks.first_try import try_first
from millrace.config.schema import Config
from millrace.conversations.tokenizer import make_character_tokenizer
from millrace.core.errors import DataError
from millrace.core.types import Abstain, Failed, Scored
from millrace.evaluation.trials import Trial, judge, run_trials, unmet
from millrace.rewards.reference_completions import (
    ReferenceCompletion,
    in_pattern,
    told_references,
)

pytestmark = pytest.mark.usefixtures("warm")

TEXT = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 \\{}[]()<>/+-=*.,:;?#'\"|$%^&"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_character_tokenizer(directory, TEXT)
    return directory


def config_for(model: Path, directory: Path, answers: list[Any], **reward: Any) -> Config:
    rows = [{"prompt": f"{number}?", "answer": answer} for number, answer in enumerate(answers)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Config.model_validate(
        {
            "model": {"path": str(model)},
            "task": {"kind": "file", "path": str(directory / "rows.jsonl")},
            "reward": reward,
            "sampling": {"max_tokens": 64},
        }
    )


SUM = {
    "kind": "sum",
    "members": [
        {"name": "form", "reward": {"kind": "pattern", "pattern": ".*"}},
        {"name": "right", "reward": {"kind": "exact", "extract": "= (.+)"}},
    ],
}


@pytest.mark.parametrize(
    ("answers", "reward", "says"),
    [
        (["a", ["b", "c"], "d"], {"kind": "exact"}, r"rows.jsonl:2: .*a list.*`reward.answer_is` to \"any\""),
        (["a", {"value": "b"}], {"kind": "exact"}, "rows.jsonl:2: .*a table with the keys value"),
        (["a", "Zürich"], {"kind": "exact"}, r"rows.jsonl:2: 'Zrich' gets 0, not 1"),
        (["a", ""], {"kind": "exact"}, "rows.jsonl:2: .*is empty"),
        (["1/2", r"\frac{1}{"], {"kind": "math"}, "rows.jsonl:2: .*nor mathematics"),
        (
            ["#### 1", "2"],
            {"kind": "math", "extract_answer": "#### (.+)"},
            "rows.jsonl:2: .*has nothing that",
        ),
        (["a", ["b"]], {"kind": "exact", "extract": "= (.+)"}, "rows.jsonl:2: .*a list"),
        (["a", ["b"]], SUM, "rows.jsonl:2: right: .*a list"),
        (
            ['{"a": 1}', '{"b": 1}'],
            {"kind": "json", "json_schema": '{"required": ["a"]}'},
            r"rows.jsonl:2: '{\"b\": 1}' gets 0, not 1",
        ),
    ],
)
def test_a_reference_answer_that_cannot_score_refuses_the_run_with_its_row(
    model: Path, tmp_path: Path, answers: list[Any], reward: dict[str, Any], says: str
) -> None:
    config = config_for(model, tmp_path, answers, **reward)
    with pytest.raises(DataError, match=f"(?s)1 of {len(answers)} reference answers.*{says}"):
        try_first(config)


@pytest.mark.parametrize("reward", [{"kind": "exact"}, SUM])
def test_a_run_that_proves_no_reference_answers_begins_with_any(
    model: Path, tmp_path: Path, reward: dict[str, Any]
) -> None:
    allowed = config_for(model, tmp_path, ["a", ["b"]], **reward, prove_references=False)
    assert try_first(allowed).task.rows == 2


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        ([["a", "b"], ["c"]], {"kind": "exact", "answer_is": "any"}),
        ([[1, 2], {"a": [True]}], {"kind": "exact", "answer_is": "json"}),
        (["a", 18.0, True], {"kind": "exact", "extract": "<answer>(.*?)</answer>"}),
        (
            ["a", 18.0],
            {"kind": "exact", "extract": "(?:is|are) (.*)"},
        ),  # nobody knows a text for this pattern
        (["1/2", 18.0, "x^2", "Paris", "5 cm", "(1, 2)"], {"kind": "math"}),
        ([r"So $\boxed{42}$.", "1 + 1 = 2\n#### 2"], {"kind": "math"}),
        (["a", "b" * 100], {"kind": "exact"}),  # longer than a completion
        (["a", "b"], SUM),
        (["no JSON", "a"], {"kind": "json"}),
    ],
)
def test_a_run_whose_reference_answers_score_begins(
    model: Path, tmp_path: Path, answers: list[Any], reward: dict[str, Any]
) -> None:
    assert try_first(config_for(model, tmp_path, answers, **reward)).task.rows == len(answers)


def test_a_trial_of_a_task_names_the_row_too(model: Path, tmp_path: Path) -> None:
    results = run_trials(config_for(model, tmp_path, ["a", "Zürich"], kind="exact"), 2, [])
    assert [result["unmet"] for result in results if result["unmet"]] == [
        "rows.jsonl:2: 'Zrich' gets 0, not 1"
    ]
    assert any(
        "1 reference answers have not full marks, the first: rows.jsonl:2" in one for one in judge(results)
    )


# ---------------------------------------------------------------- what is asked


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (None, "18"),
        ("#### (.+)", "#### 18"),
        ("<answer>(.*?)</answer>", "<answer>18</answer>"),
        (r"(?s)<answer>\s*(.*?)\s*</answer>", "<answer> 18 </answer>"),
        (r"\\boxed\{(.*?)\}", r"\boxed{18}"),
        (r"^Answer: (\d+)$", "Answer: 18"),
        (r"\[\[(.*)\]\]", "[[18]]"),
        (r"answer\b: (.*)", "answer: 18"),
        ("(?:is|are) (.*)", None),
        ("([a-z]+)", None),
        ("x+ (.*)", None),
    ],
)
def test_a_text_is_found_in_which_a_pattern_finds_the_answer(pattern: str | None, text: str | None) -> None:
    assert in_pattern(pattern, "18") == text


def trial(full: float | None, member: str = "") -> Trial:
    return Trial("", 0, 0, "rows:1", "reference", "x", [], "x", full, member)


def test_only_full_marks_that_are_known_can_be_missed() -> None:
    assert unmet(trial(None), Scored(0.0)) is None
    assert unmet(trial(1.0), Scored(1.0)) is None
    assert unmet(trial(1.0), Abstain("no opinion")) is None
    assert unmet(trial(1.0), Scored(0.5)) == "rows:1: 'x' gets 0.5, not 1"
    assert unmet(trial(1.0), Failed("no tests")) == "rows:1: no tests"
    assert unmet(trial(1.0, "right"), Scored(-3.0, {"right": 1.0})) is None
    assert unmet(trial(1.0, "right"), Scored(3.0, {"right": 0.0})) == "rows:1: right: 'x' gets 0, not 1"
    assert unmet(trial(1.0, "right"), Failed("other: broken")) is None


def test_a_reward_without_a_known_reference_gets_the_answer_as_text() -> None:
    from millrace.config.tables.task import FunctionRewardSection

    reward = FunctionRewardSection(path="own.py:reward")
    assert told_references(reward, 18.0, {}) == [ReferenceCompletion("18")]
    assert told_references(reward, ["a", 1], {}) == [ReferenceCompletion('["a", 1]')]
    assert told_references(reward, None, {}) == []
