"""Tests of a program as data: what to call it with, and what it should give. No answer enters the program."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.core.errors import DataError
from millrace.sandbox.code_asserts import CodeAsserts
from millrace.sandbox.execution import CallAnswer, Execution, ProgramOutcome
from millrace.sandbox.inside.limits import Limits
from millrace.sandbox.sandbox import Sandbox

RELATIVE = 1e-9
"""Two numbers are equal if they differ by less than this share, and one of them is no integer."""


@dataclass(frozen=True)
class CodeTests:
    """Tests of a function, or without one of a program that reads text and prints text.

    `inputs` are lists of arguments, or texts. `outputs` are values of JSON, or texts.
    """

    function: str | None
    inputs: list[Any]
    outputs: list[Any]


@dataclass(frozen=True)
class CodeVerdict:
    """How many tests ran and passed, and why not all. `outcome` is PASSED only if every test passed."""

    outcome: ProgramOutcome
    num_passed: int
    num_run: int
    num_tests: int
    reason: str
    output: str
    cpu_s: float


def read_tests(column: Any, function: str | None = None) -> CodeTests:
    """The tests of a row: `{"inputs": [...], "outputs": [...], "fn_name": name}`, as data or as text of JSON.

    Args:
        function: the function to call, instead of `fn_name`. Without both, a program that reads and prints.
    Raises:
        DataError: the column has another form; or no test, so that any program would pass.
    """
    if isinstance(column, str):
        try:
            column = json.loads(column)
        except (ValueError, RecursionError) as error:
            raise DataError(f"the tests are no JSON: {error}") from None
    if not isinstance(column, Mapping) or not {"inputs", "outputs"} <= set(column):
        raise DataError(f'the tests need "inputs" and "outputs", and are {str(column)[:80]!r}')
    inputs, outputs = list(column["inputs"]), list(column["outputs"])
    function = function or column.get("fn_name")
    if not inputs or len(inputs) != len(outputs):
        raise DataError(
            f"the tests have {len(inputs)} inputs and {len(outputs)} outputs, they need as many, and one"
        )
    wanted = "a list of arguments, as `fn_name` names a function" if function else "a text"
    kind: tuple[type, ...] = (list, tuple) if function else (str,)
    for one in inputs:
        if not isinstance(one, kind):
            raise DataError(f"an input of the tests is {wanted}, not {str(one)[:80]!r}")
    return CodeTests(function, inputs, outputs)


def judge(sandbox: Sandbox, code: str, tests: CodeTests | CodeAsserts, limits: Limits) -> CodeVerdict:
    """Run a program on the inputs, then compare what it left with the outputs; or let asserts call it.

    Raises:
        SandboxError: the sandbox failed; nothing is known of the program.
        DataError: the asserts cannot be run.
    """
    if isinstance(tests, CodeAsserts):
        execution = sandbox.examine(code, tests, limits)
        errors = [answer.error for answer in execution.answers]
        return _verdict(execution, [error is None for error in errors], len(tests.tests), errors)
    if tests.function is None:
        return _judge_printed(sandbox, code, tests, limits)
    execution = sandbox.call(code, tests.function, tests.inputs, limits)
    pairs = zip(execution.answers, tests.outputs, strict=False)
    passed = [answer.error is None and is_equal(answer.value, output) for answer, output in pairs]
    given = [_given(answer) for answer in execution.answers]
    return _verdict(execution, passed, len(tests.inputs), given)


def _judge_printed(sandbox: Sandbox, code: str, tests: CodeTests, limits: Limits) -> CodeVerdict:
    """Each input is a run of its own. All together have the time of one program."""
    passed: list[bool] = []
    spent_s = 0.0
    for text, output in zip(tests.inputs, tests.outputs, strict=True):
        left = Limits(**{**limits.to_json(), "wall_s": max(0.1, limits.wall_s - spent_s)})
        execution = sandbox.run(code, text.encode(), left)
        spent_s += execution.wall_s
        printed = execution.stdout.decode(errors="replace")
        passed.append(execution.fault is None and lines_of(printed) == lines_of(str(output)))
        if execution.fault is ProgramOutcome.TIMED_OUT:
            break
    given = ["what it printed is not the expected output"] * len(passed)
    return _verdict(execution, passed, len(tests.inputs), given)


def _verdict(
    execution: Execution, passed: Sequence[bool], num_tests: int, given: Sequence[str | None]
) -> CodeVerdict:
    num_passed = sum(passed)
    reason = execution.reason
    if execution.fault is not None:
        outcome = execution.fault
    elif num_passed == num_tests == len(passed):
        outcome = ProgramOutcome.PASSED
    else:
        outcome = ProgramOutcome.FAILED
        index = passed.index(False)
        reason = reason or f"test {index + 1} of {num_tests}: {given[index]}"
    return CodeVerdict(outcome, num_passed, len(passed), num_tests, reason, execution.output, execution.cpu_s)


def _given(answer: CallAnswer) -> str:
    given = f"it raised {answer.error}" if answer.error is not None else f"it gave {answer.value!r}"[:200]
    return f"{given}, which is not the expected output"


def lines_of(text: str) -> list[list[str]]:
    """The words of each line; blank lines at the end do not count."""
    return [line.split() for line in text.rstrip().splitlines()]


def is_equal(value: Any, expected: Any) -> bool:
    """Whether two values of JSON are equal. True is not 1; a list is not a text; NaN equals nothing."""
    try:
        return _is_equal(value, expected)
    except RecursionError:
        return False


def _is_equal(value: Any, expected: Any) -> bool:
    if isinstance(expected, bool) or isinstance(value, bool) or expected is None or value is None:
        return value is expected
    if isinstance(expected, int | float):
        return isinstance(value, int | float) and _is_close(value, expected)
    if isinstance(expected, str):
        return isinstance(value, str) and value == expected
    if isinstance(expected, list | tuple):
        return (
            isinstance(value, list) and len(value) == len(expected) and all(map(_is_equal, value, expected))
        )
    if isinstance(expected, Mapping):
        return (
            isinstance(value, dict)
            and value.keys() == expected.keys()
            and all(_is_equal(value[key], expected[key]) for key in expected)
        )
    return False


def _is_close(value: float, expected: float) -> bool:
    if isinstance(value, int) and isinstance(expected, int):
        return value == expected
    try:
        return math.isclose(value, expected, rel_tol=RELATIVE, abs_tol=1e-12)
    except OverflowError:  # an integer that is no float
        return False
