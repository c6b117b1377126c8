"""Tests that are Python: they call a program in another process, and only plain values come back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millrace.core.errors import DataError
from millrace.sandbox.code_asserts import read_asserts
from millrace.sandbox.code_tests import judge
from millrace.sandbox.execution import ProgramOutcome
from millrace.sandbox.inside.limits import Limits
from millrace.sandbox.inside.values import decode, encode
from millrace.sandbox.sandbox import Sandbox

LIMITS = Limits(cpu_s=1, wall_s=30, memory_bytes=256 * 2**20)
HUMANEVAL = """
METADATA = {"author": "x"}

def check(candidate):
    assert candidate([1, 2], k=1) == [2]
    assert candidate([], 3) == []
    assert abs(sum(candidate([0.5, 1.5])) - 2.0) < 1e-6
"""
RIGHT = "def drop(items, k=0):\n    return items[k:]"


def verdict_of(sandbox: Sandbox, code: str, column: Any, limits: Limits = LIMITS, **columns: Any) -> Any:
    asserts = read_asserts(column, columns)
    assert asserts is not None
    return judge(sandbox, code, asserts, limits)


def test_a_check_of_a_candidate_passes_with_the_right_program_alone(isolated: Sandbox) -> None:
    right = verdict_of(isolated, RIGHT, HUMANEVAL, entry_point="drop")
    assert (right.outcome, right.num_passed, right.num_tests) == (ProgramOutcome.PASSED, 1, 1)
    wrong = verdict_of(isolated, RIGHT.replace("[k:]", "[:k]"), HUMANEVAL, entry_point="drop")
    assert wrong.outcome is ProgramOutcome.FAILED and wrong.num_passed == 0
    assert wrong.reason == "test 1 of 1: AssertionError: "
    called_at_once = verdict_of(
        isolated, "def drop(*_): return 1", f"{HUMANEVAL}\ncheck(drop)", entry_point="drop"
    )
    assert called_at_once.num_passed == 0


def test_each_text_of_a_list_is_a_test_and_setup_runs_first(isolated: Sandbox) -> None:
    tests = [
        "assert set(pairs((1, 2), {3})) == {(1, 3), (2, 3)}",
        "assert math.isclose(len(pairs((1,), {3})), 1)",
        "assert pairs((), set()) == [None]",
        "try:\n    pairs(1, 2)\n    assert 0\nexcept TypeError as error:\n    assert 'able' in str(error)",
    ]
    code = "def pairs(a, b): return [(x, y) for x in a for y in b]"
    verdict = verdict_of(isolated, code, tests, test_setup_code="import math", test_imports=[])
    assert (verdict.outcome, verdict.num_passed, verdict.num_tests) == (ProgramOutcome.FAILED, 3, 4)
    assert verdict.reason == "test 3 of 4: AssertionError: "


def test_values_of_python_go_there_and_back(isolated: Sandbox) -> None:
    value = (None, True, -(10**400), 1.5, "\ud800é", b"\x00", [1], {2, 3}, frozenset({4}), {(5,): {"a": 1j}})
    assert decode(json.loads(json.dumps(encode(value)))) == value
    assert str(decode(json.loads(json.dumps(encode([float("nan"), float("-inf")]))))) == "[nan, -inf]"
    tests = [f"value = {value!r}", "assert same(value) == value and type(same(value)) is tuple"]
    assert verdict_of(isolated, "def same(x): return x", tests).num_passed == 2


HOSTILE = {
    "is equal to everything": (
        "class Equal:\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n"
        "def f(x): return Equal()"
    ),
    "is a text that is equal to everything": (
        "class Equal(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\n"
        "def f(x): return Equal('')"
    ),
    "is a list that is equal to everything": (
        "class Equal(list):\n    def __eq__(self, other): return True\n"
        "    def __iter__(self): raise AssertionError\ndef f(x): return Equal()"
    ),
    "has a class of its own inside": (
        "class Equal(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def f(x): return [Equal(1), {Equal(2)}, {Equal(3): Equal(4)}]"
    ),
    "has the encoding replaced": (
        "import sys\nfor module in list(sys.modules.values()):\n"
        "    if hasattr(module, 'encode'): module.encode = lambda value: {'object': 'Equal'}\n"
        "def f(x): return 1"
    ),
    "answers with a tag of its own": (
        "import os, struct\ndef f(x):\n"
        '    reply = b\'{"value": {"object": "equal"}}\'\n'
        "    os.write(4, struct.pack('<Q', len(reply)) + reply); os._exit(0)"
    ),
    "answers as the tests do": (
        "import os, struct\ndef f(x):\n    for _ in range(3):\n"
        '        reply = b\'{"value": ["passed"]}\'\n'
        "        os.write(4, struct.pack('<Q', len(reply)) + reply)\n    return ['passed']"
    ),
    "raises what ends tests": "def f(x): raise SystemExit(0)",
    "raises what tests pass by": (
        "class CannotBeAsked(BaseException): pass\ndef f(x): raise CannotBeAsked('passed')"
    ),
    "looks for the tests": (
        "import gc, sys, os\ndef f(x):\n"
        "    found = [each for each in gc.get_objects() if isinstance(each, dict) and 'candidate' in each]\n"
        "    try: found += os.listdir('/proc')\n    except OSError: pass\n"
        "    return found or sys.modules.get('tests')"
    ),
    "waits": "import time\ndef f(x): time.sleep(60)",
    "ends": "import os\nos._exit(0)",
    "is too deep": "def f(x):\n    y = []\n    for _ in range(100_000): y = [y]\n    return y",
    "is not a number": "def f(x): return float('nan')",
}


@pytest.mark.parametrize("name", HOSTILE, ids=[name.replace(" ", "-") for name in HOSTILE])
def test_a_program_without_the_answer_passes_no_assert(any_level: Sandbox, name: str) -> None:
    tests = ["assert f(1) == 'the secret answer'", "assert f(2) == ['another', {'secret'}]"]
    limits = Limits(**{**LIMITS.to_json(), "wall_s": 0.5}) if name == "waits" else LIMITS
    verdict = verdict_of(any_level, HOSTILE[name], tests, limits)
    assert verdict.num_passed == 0 and verdict.outcome is not ProgramOutcome.PASSED and verdict.reason


@pytest.mark.parametrize(
    ("column", "columns", "message"),
    [
        (["assert f(1) is f(1)"], {}, "compares identity"),
        (["assert f(x for x in 'ab')"], {}, "a value of type generator cannot be sent"),
        (["class Own: pass\nassert f(Own())"], {}, "a value of type Own cannot be sent"),
        (["assert f(1) == g(2)"], {}, r"call \['f', 'g'\].*`entry_point`"),
        (["assert f(1) =="], {}, "no Python"),
        (["assert f(1)"], {"test_setup_code": "import no_such_module"}, "setup.*no_such_module"),
        (["assert f(1)"], {"test_setup_code": "value = f(1)"}, "setup of the tests calls the program"),
        (["def f(x): return 1\nassert f(1)"], {"entry_point": "f"}, "they define f themselves"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_tests_that_cannot_be_run_are_refused_by_name_and_are_no_zero(
    isolated: Sandbox, column: Any, columns: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        verdict_of(isolated, "def f(x): return x", column, **columns)


def test_the_tests_of_a_row_are_confined_as_a_program_is(isolated: Sandbox) -> None:
    tests = ["import os\nassert f(1) and os.open('/etc/passwd', os.O_RDONLY)"]
    verdict = verdict_of(isolated, "def f(x): return x", tests)
    assert verdict.num_passed == 0
    assert "PermissionError" in verdict.reason or "FileNotFoundError" in verdict.reason
