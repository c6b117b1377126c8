"""Tests of a program as data: what to call it with, what it should give, and when an answer equals that:
returned values, and printed text. No answer enters the program.
"""

from __future__ import annotations

import ast
import decimal
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from millrace.core.errors import DataError
from millrace_sandbox.code_asserts import CodeAsserts, function_of
from millrace_sandbox.inside.limits import Limits
from millrace_sandbox.inside.values import BYTES, NUMBER, SET, TEXT
from millrace_sandbox.program import CallAnswer, Execution, ProgramOutcome
from millrace_sandbox.sandbox import Sandbox

NAMES = (("inputs", "outputs"), ("input", "output"))
CASES = "test_cases"
CALLS = ("functional", "function_call", "call")
"""How public data sets mark a test that calls a function."""
BEYOND = ("generated_checker", "interaction_format", "input_file", "input_mode", "FAIL_TO_PASS")
"""Columns of open-r1's Codeforces, CodeContests and SWE-bench, where not only equal texts are right."""
BEGUN, READS = re.compile(r"^\s*(class|def)\s", re.MULTILINE), re.compile(r"\binput\(|\bstdin\b")
"""What a function begins with, as GeeksforGeeks has it in TACO, and what a program has that reads."""
ROOM = 4
"""So many bytes may stand for a character of an expected output."""
STREAMS = ("stdin", "stdout")
"""The keys below which SandboxFusion has a text."""
_NONE: Mapping[str, Any] = MappingProxyType({})


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


def read_tests(column: Any, function: str | None = None, columns: Mapping[str, Any] = _NONE) -> CodeTests:
    """The tests of a row, as data or as text of JSON, in the forms of public data sets:

    - APPS, TACO: `{"inputs": [...], "outputs": [...], "fn_name": name}`; CodeContests has `input` and
      `output`;
    - SYNTHETIC-1: a list of such cases below `test_cases`;
    - LiveCodeBench: a list of `{"input": text, "output": text, "testtype": "stdin" or "functional"}`.

    An input of a function is the list of its arguments, or a text with an argument in JSON in each line.
    A text for a program that reads and prints may be a list of lines.

    Args:
        function: the function to call, instead of `fn_name`. Without both, a program that reads and prints.
        columns: the row, whose `metadata` may name the function, as in LiveCodeBench.
    Raises:
        DataError: the column has another form; or no test, so that any program would pass; or the row says
            that its tests need more than texts to be compared.
    """
    if needs := needed_beyond(columns):
        more = "files, a partner or a checker of its own, and here texts are compared"
        raise DataError(f"the row has {needs[0]!r}: {more}. Leave such rows out")
    if isinstance(column, str):
        column = _from_json(column, "the tests are")
    if isinstance(column, Mapping) and CASES in column:
        column = column[CASES]
    if isinstance(column, list | tuple) and column and all(isinstance(one, Mapping) for one in column):
        column = _of_cases(column, function or _metadata(columns).get("func_name"))
    names = [pair for pair in NAMES if isinstance(column, Mapping) and {*pair} <= set(column)]
    if not names:
        raise DataError(f'the tests need "inputs" and "outputs", and are {str(column)[:80]!r}')
    inputs, outputs = (list(column[name]) for name in names[0])
    function = function_of(function or column.get("fn_name"))
    if not inputs or len(inputs) != len(outputs):
        raise DataError(
            f"the tests have {len(inputs)} inputs and {len(outputs)} outputs, they need as many, and one"
        )
    if function is None:
        begun = str(columns.get("starter_code"))
        if BEGUN.search(begun) and not READS.search(begun):
            shown = f"the row's `starter_code` begins a function, and its tests name none: {begun[:80]!r}"
            raise DataError(f"{shown}. Leave such rows out")
        return CodeTests(None, [*map(_text, inputs)], [*map(_text, outputs)])
    if all(isinstance(one, str) for one in (*inputs, *outputs)):  # of DeepCoder and PRIME: JSON is JSON
        outputs = [_of_json(output) for output in outputs]
    return CodeTests(function, [*map(_arguments, inputs)], outputs)


def needed_beyond(columns: Mapping[str, Any]) -> list[str]:
    """The columns that say that tests need more than a program."""
    return [name for name in BEYOND if columns.get(name) not in (None, "", "stdio")]


def _metadata(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """What LiveCodeBench has in `metadata`: a table, or text of JSON."""
    found = table.get("metadata")
    found = _of_json(found) if isinstance(found, str) else found
    return found if isinstance(found, Mapping) else {}


def _of_cases(cases: Sequence[Mapping[str, Any]], function: str | None) -> dict[str, Any]:
    """Tests that are a list of cases, as one table. A case of a function has its output as JSON: as text, or
    as data."""
    if any(not {"input", "output"} <= set(case) for case in cases):
        raise DataError(f'each test needs "input" and "output", and the first is {str(cases[0])[:80]!r}')
    calls = [case.get("testtype", case.get("type")) in CALLS for case in cases]
    if any(calls) and not all(calls):
        raise DataError("some of the tests call a function, and some print")
    first = cases[0]
    named = first.get("fn_name") or _metadata(first).get("func_name")
    if any(calls) and not (named := named or function):
        raise DataError(
            "the tests call a function, and nothing names it: neither `fn_name`, nor `func_name` in the "
            "column `metadata`. Set `reward.function` where all rows have one name"
        )
    outputs = [
        _from_json(case["output"], "an output of the tests is")
        if is_call and isinstance(case["output"], str)
        else case["output"]
        for case, is_call in zip(cases, calls, strict=True)
    ]
    return {"inputs": [case["input"] for case in cases], "outputs": outputs, "fn_name": named}


def _of_json(text: str) -> Any:
    """The value of a text of JSON; the text, if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _from_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{what} no JSON: {error}") from None


def _arguments(given: Any) -> list[Any]:
    if isinstance(given, str):
        return [_from_json(line, "an input of the tests is a line that is") for line in given.splitlines()]
    if not isinstance(given, list | tuple):
        raise DataError(
            f"an input of the tests is a list of arguments, for `fn_name` names a function, not "
            f"{str(given)[:80]!r}"
        )
    return list(given)


def _text(given: Any) -> str:
    if isinstance(given, Mapping) and len(given) == 1 and set(given) <= {*STREAMS}:
        given = next(iter(given.values()))
    if isinstance(given, list | tuple) and not any(isinstance(one, list | tuple | Mapping) for one in given):
        return "\n".join(map(str, given))
    if isinstance(given, str | int | float) and not isinstance(given, bool):
        return str(given)
    raise DataError(
        f"an input or an output of the tests is a text or a list of lines, not {str(given)[:80]!r}"
    )


def judge(
    sandbox: Sandbox, code: str, tests: CodeTests | CodeAsserts, limits: Limits, *, given: str = ""
) -> CodeVerdict:
    """Run a program on the inputs, then compare what it left with the outputs; or let asserts call it.

    Raises:
        SandboxError: the sandbox failed; nothing is known of the program.
        DataError: the asserts cannot be run, or the code that is given to the program.
    """
    if isinstance(tests, CodeAsserts):
        execution = sandbox.examine(code, tests, limits, given=given)
        errors = [answer.error for answer in execution.answers]
        return _verdict(execution, [error is None for error in errors], len(tests.tests), errors)
    if tests.function is None:
        return _judge_printed(sandbox, code, tests, limits)
    limits = _with_room(limits, json.dumps(tests.outputs, default=str))
    execution = sandbox.call(code, tests.function, tests.inputs, limits, given=given)
    passed = max((_passed(execution.answers, outputs) for outputs in _readings(tests.outputs)), key=sum)
    shown = [_given(answer) for answer in execution.answers]
    return _verdict(execution, passed, len(tests.inputs), shown)


def _readings(outputs: list[Any]) -> list[list[Any]]:
    """What a row may mean by its expected values. TACO has each in a list of one, and a list of one may be
    the value itself: where all are such lists, they are all the one or all the other."""
    if all(isinstance(output, list | tuple) and len(output) == 1 for output in outputs):
        return [outputs, [output[0] for output in outputs]]
    return [outputs]


def _passed(answers: Sequence[CallAnswer], outputs: list[Any]) -> list[bool]:
    """A function that gives None answers by its first argument too, as those of LeetCode that change it."""
    pairs = zip(answers, outputs, strict=False)
    return [
        answer.error is None and any(is_equal(value, output) for value in (answer.value, *answer.left))
        for answer, output in pairs
    ]


def _judge_printed(sandbox: Sandbox, code: str, tests: CodeTests, limits: Limits) -> CodeVerdict:
    """Each input is a run of its own. All together have the time of one program.

    The verdict is that of the first run with a fault, or else of the first wrong output.
    """
    runs: list[Execution] = []
    passed: list[bool] = []
    for text, output in zip(tests.inputs, tests.outputs, strict=True):
        left_s = limits.wall_s - sum(run.wall_s for run in runs)
        bounds = _with_room(replace(limits, wall_s=max(0.1, left_s)), output)
        run = sandbox.run(code, text.encode(errors="surrogatepass"), bounds)
        runs.append(run)
        passed.append(run.fault is None and prints_the_same(run.stdout.decode(errors="replace"), output))
        if run.fault is ProgramOutcome.TIMED_OUT:
            break
    number = next((number for number, run in enumerate(runs) if run.fault is not None), None)
    if number is None:
        number = passed.index(False) if not all(passed) else 0
    shown = runs[number]
    reason = shown.reason and f"test {number + 1} of {len(tests.inputs)}: {shown.reason}"
    execution = replace(shown, reason=reason, cpu_s=sum(run.cpu_s for run in runs))
    given = ["what it printed is not the expected output"] * len(passed)
    return _verdict(execution, passed, len(tests.inputs), given)


def _with_room(limits: Limits, expected: str) -> Limits:
    """Limits in which a program may write what is expected of it."""
    return replace(limits, output_bytes=limits.output_bytes + ROOM * len(expected))


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


# ---------------------------------------------------------------- equality


TOLERANCE = 1e-6
"""Two numbers are equal if they differ by no more than this share, as for the judges of Codeforces and
AtCoder. An expected integer is exact: a number with a point may differ from it by this much, and not by a
share of it."""
NEAR_ZERO = 1e-9
"""So much may a returned number differ in any case: the rest of a sum that should be 0."""
EXACT = 2**53
"""Integers below are floats without a loss."""
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]{1,4})?")
"""As programs print numbers. 007, +5 and 1,000 are no numbers: there the text matters."""


def is_equal(value: Any, expected: Any) -> bool:
    """Whether two values of JSON are equal. True is not 1; a list is not a text; NaN equals nothing.

    What JSON has not is equal to each form that data sets give it: a set to its members in any order, a date
    to its text, bytes to their text or their numbers, all of them also to what Python shows.
    """
    try:
        return _is_equal(value, expected)
    except RecursionError:
        return False


def _is_equal(value: Any, expected: Any) -> bool:
    if isinstance(value, dict) and len(value) == 1 and (tag := next(iter(value))) in _FOREIGN:
        return _FOREIGN[tag](value[tag], expected)
    if isinstance(expected, str) and isinstance(value, list) and expected.startswith("("):
        return _is_equal(value, _shown(expected, tuple))
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


def _is_set(members: Any, expected: Any) -> bool:
    """The members may be in any order, and none is there twice."""
    others = _shown(expected, set) if isinstance(expected, str) else expected
    if not isinstance(members, list) or not isinstance(others, list | set) or len(members) != len(others):
        return False
    one, other = sorted(members, key=_rank), sorted(others, key=_rank)
    return all(map(_is_equal, one, other)) and not any(map(_is_equal, one, one[1:]))


def _rank(value: Any) -> tuple[float, str]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (value, "") if is_number else (math.inf, json.dumps(value, sort_keys=True, default=str))


def _is_bytes(digits: Any, expected: Any) -> bool:
    try:
        data = bytes.fromhex(digits)
    except (TypeError, ValueError):
        return False
    if isinstance(expected, str):
        return data == expected.encode(errors="replace") or repr(data) == expected
    return isinstance(expected, list) and list(data) == expected


def _is_text(text: Any, expected: Any) -> bool:
    """A moment has a T or a space between its day and its time."""
    forms = (expected, re.sub(r"(?<=^\d{4}-\d\d-\d\d)T", " ", expected)) if isinstance(expected, str) else ()
    return text in forms


def _is_number(pair: Any, expected: Any) -> bool:
    if not isinstance(pair, list) or len(pair) != 2:
        return False
    return _is_equal(pair[isinstance(expected, str)], expected)


_FOREIGN = {SET: _is_set, BYTES: _is_bytes, TEXT: _is_text, NUMBER: _is_number}


def _shown(text: str, kind: type) -> Any:
    """The value that Python shows so, if it is of that kind; else None."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return set[Any]() if kind is set and text == "set()" else None
    return value if isinstance(value, kind) else None


def _is_close(value: float, expected: float) -> bool:
    if value == expected:
        return True
    if isinstance(expected, int):
        return isinstance(value, float) and abs(expected) < EXACT and abs(value - expected) <= TOLERANCE
    try:
        return math.isclose(value, expected, rel_tol=TOLERANCE, abs_tol=NEAR_ZERO)
    except OverflowError:  # an integer that is no float
        return False


def prints_the_same(printed: str, expected: str) -> bool:
    """Whether two texts have the same words in the same lines; blank lines at the ends do not count.

    Two words that are numbers are equal as numbers: 0.50 is 0.5. They may differ by `TOLERANCE`, of the
    expected number or of 1. An expected integer is exact (see `TOLERANCE`), and two integers are the same
    text.
    """
    texts = (printed.strip(), expected.strip())
    if texts[0] == texts[1]:
        return True
    lines = [[line.split() for line in text.splitlines()] for text in texts]
    return len(lines[0]) == len(lines[1]) and all(map(_are_same_words, *lines))


def _are_same_words(printed: list[str], expected: list[str]) -> bool:
    return len(printed) == len(expected) and all(map(_is_same_word, printed, expected))


def _is_same_word(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    if not (_NUMBER.fullmatch(printed) and _NUMBER.fullmatch(expected)):
        return False
    if _INTEGER.fullmatch(printed) and _INTEGER.fullmatch(expected):
        return False
    try:
        one, other = decimal.Decimal(printed), decimal.Decimal(expected)
        size = decimal.Decimal(1) if _INTEGER.fullmatch(expected) else max(decimal.Decimal(1), abs(other))
        return abs(one - other) <= decimal.Decimal(TOLERANCE) * size
    except decimal.DecimalException:  # beyond all exponents
        return False
