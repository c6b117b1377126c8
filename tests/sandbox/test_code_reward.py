"""The reward of programs: the examples, broken rows, and hostile completions."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.config.tables.task import CodeRewardSection
from millrace.core.errors import DataError, SandboxError
from millrace.episodes.reward_worker import make_answer
from millrace.rewards.program_text import program_of
from millrace.rewards.reference_completions import reference_program
from millrace_sandbox.code_reward import CodeReward
from tests.sandbox.hostile import completions

ROWS = [json.loads(line) for line in (Path(__file__).parents[2] / "examples" / "code.jsonl").open()]
HOSTILE = 60


@pytest.fixture(scope="module")
def reward(sandboxes: dict[str, Any]) -> Iterator[CodeReward]:
    """At the strongest level that is here."""
    try:
        made = CodeReward(
            CodeRewardSection(program_cpu_s=1, timeout_s=20, program_memory_mb=256, score="share")
        )
    except SandboxError as error:
        pytest.skip(str(error))
    yield made
    made.close()


def test_every_reference_of_the_example_passes_all_its_tests(reward: CodeReward) -> None:
    for row in ROWS:
        scored = reward(f"Here it is:\n```python\n{row['answer']}\n```\n", row["answer"], row)
        assert (scored["reward"], scored["tests_passed"]) == (1.0, 1.0), row["prompt"]


def test_a_program_that_does_nothing_earns_nothing_for_any_row(reward: CodeReward) -> None:
    for row in ROWS[:8]:
        assert reward("", "", row)["reward"] == 0.0


def test_a_program_that_passes_a_part_earns_that_share_and_is_named_where_it_ends(reward: CodeReward) -> None:
    tests = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [1, 2]}
    scored = reward(
        "import os\ndef f(x): return x if x == 1 else os.abort()", None, {"tests": json.dumps(tests)}
    )
    assert (scored["reward"], scored["killed"], scored["timed_out"]) == (0.5, 1.0, 0.0)


def test_a_row_may_have_asserts_as_public_data_sets_have(reward: CodeReward) -> None:
    mbpp = {"tests": ["assert f(1) == (1, 2)", "assert f(2) == (2, 4)"], "test_setup_code": ""}
    assert reward("def f(x): return x, x + 1", None, mbpp)["reward"] == 0.5
    check = "def check(candidate):\n    assert candidate(1) == (1, 2)\n"
    assert reward("def f(x): return x, 2 * x", None, {"tests": check, "entry_point": "f"})["reward"] == 1.0
    with pytest.raises(DataError, match="compares identity"):
        reward("def f(x): return x", None, {"tests": ["assert f(1) is f(1)"]})


def test_all_or_nothing_is_the_default(sandboxes: dict[str, Any], reward: CodeReward) -> None:
    strict = CodeReward(CodeRewardSection())
    tests = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [1, 3]}
    try:
        assert strict("def f(x): return x", None, {"tests": tests})["reward"] == 0.0
        assert strict("def f(x): return 2 * x - 1", None, {"tests": tests})["reward"] == 1.0
    finally:
        strict.close()


def test_a_row_without_tests_is_an_error_and_no_zero(reward: CodeReward) -> None:
    with pytest.raises(DataError, match=r"`reward.tests` names the column 'tests'"):
        reward("def f(): pass", None, {"prompt": "x"})


def test_a_failure_of_the_sandbox_is_an_error_and_no_zero(reward: CodeReward, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise SandboxError("no sandbox")

    monkeypatch.setattr(reward._sandbox, "_execute", fail)
    with pytest.raises(SandboxError):
        reward("def f(): pass", None, ROWS[0])


def test_the_program_is_the_last_fenced_block() -> None:
    assert program_of("```\na\n```\ntext\n```python\nb\n```\nend") == "b\n"
    assert program_of("x = '`'") == "x = '`'"
    assert make_answer(CodeRewardSection())("text\n```py\nx = 1\n```") == "x = 1"


def test_no_hostile_completion_earns_anything_and_the_reward_goes_on(reward: CodeReward) -> None:
    draws = random.Random(7)
    for completion, row in completions(HOSTILE, draws, waits=False):
        assert reward(completion, None, row)["reward"] == 0.0, completion
    row = ROWS[0]
    assert reward(row["answer"], None, row)["reward"] == 1.0


def test_the_tests_that_ran_are_counted(reward: CodeReward) -> None:
    """A verifier that never ran a test is what the doctor looks for."""
    row = ROWS[0]
    tests = row["tests"] if isinstance(row["tests"], dict) else json.loads(row["tests"])
    scored = reward(f"```python\n{row['answer']}\n```\n", row["answer"], row)
    assert scored["tests_run"] == len(tests["inputs"])
    broken = reward("```python\ndef f(:\n```\n", row["answer"], row)
    assert (broken["tests_run"], broken["reward"]) == (0.0, 0.0)


SQUARE = "def square(x):\n    return x * x\n"
PROMPT = 'def square(x):\n    """Square a number."""\n'


@pytest.mark.parametrize(
    ("answer", "columns"),
    [
        (SQUARE, {}),
        (f"```python\n{SQUARE}```", {}),
        (None, {"canonical_solution": "    return x * x\n"}),
        (None, {"code": SQUARE}),
        (None, {"solutions": json.dumps([SQUARE, "def square(x): return 0"])}),
        (None, {"solutions": [SQUARE]}),
        (None, {"solutions": {"language": [2, 3], "solution": ["int x;", SQUARE]}}),
        (None, {"solutions": ["def square(x):\n    print x\n", SQUARE]}),
        ({"language": [3, 3], "solution": ["exec 'x'", SQUARE]}, {}),
    ],
)
def test_the_reference_program_of_a_row_is_a_completion_that_passes(
    reward: CodeReward, answer: Any, columns: dict[str, Any]
) -> None:
    row = {"prompt": PROMPT, "tests": ["assert square(3) == 9"], **columns}
    program = reference_program(answer, row)
    assert program is not None
    assert reward(program, answer, row)["reward"] == 1.0


@pytest.mark.parametrize(
    "columns", [{}, {"solutions": "[]"}, {"solutions": []}, {"code": " "}, {"solution": 3}]
)
def test_a_row_without_a_right_program_has_no_reference(columns: dict[str, Any]) -> None:
    assert reference_program(None, {"prompt": PROMPT, **columns}) is None
