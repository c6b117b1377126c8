"""Tests that are Python: they call a program in another process, and only plain values come back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millrace.core.errors import DataError
from millrace_sandbox.code_asserts import read_asserts
from millrace_sandbox.code_tests import judge
from millrace_sandbox.inside.limits import Limits
from millrace_sandbox.inside.values import decode, encode
from millrace_sandbox.program import ProgramOutcome
from millrace_sandbox.sandbox import Sandbox

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


SENT = {
    "a generator": ("    yield from range(x)", "assert list(f(2)) == [0, 1] and f(2) != [0, 1]"),
    "a map": ("    return map(str, range(x))", "assert ''.join(f(2)) == '01'"),
    "a range": ("    return range(x)", "assert f(2) == range(2) and f(2) != [0, 1]"),
    "a deque": ("    return collections.deque([x])", "assert list(f(2)) == [2] and f(2) != [2]"),
    "a fraction": ("    return fractions.Fraction(x, 4)", "assert f(2) == 0.5"),
    "a decimal": ("    return decimal.Decimal(x)", "assert f(2) == 2 and str(f(2)) == '2'"),
    "a range as the argument": ("    return sum(x)", "assert f(range(3)) == f(iter([1, 2])) == 3"),
    "an exception of its own class": (
        "    class Own(ValueError): pass\n    raise Own('bad')",
        "try:\n    f(1)\n    assert 0\nexcept ValueError as error:\n    assert str(error) == 'bad'",
    ),
    "an exception of its own": (
        "    class Own(Exception): pass\n    raise Own('bad')",
        "try:\n    f(1)\nexcept Exception as e:\n    assert type(e).__name__ == 'Own' and str(e) == 'bad'",
    ),
}


@pytest.mark.parametrize("name", SENT, ids=[name.replace(" ", "-") for name in SENT])
def test_what_a_program_gives_is_what_a_test_sees(isolated: Sandbox, name: str) -> None:
    body, test = SENT[name]
    code = f"import collections, decimal, fractions\ndef f(x):\n{body}"
    assert verdict_of(isolated, code, [test]).num_passed == 1


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
    "answers with a value, and changes the arguments": (
        "import os, struct\ndef f(x):\n"
        '    reply = b\'{"value": "a", "left": [["b"], {}]}\'\n'
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
        (
            ["unittest.TestCase().assertIs(f(1), f(1))"],
            {"test_imports": "import unittest"},
            "compares identity",
        ),
        (["assert f(lambda x: x)"], {}, "a value of type function cannot be sent"),
        (["class Own: pass\nassert f(Own())"], {}, "a value of type Own cannot be sent"),
        (["assert f(1) == g(2)"], {}, r"call \['f', 'g'\].*`entry_point`"),
        (["assert f(1) =="], {}, "no Python"),
        (["assert f(1)"], {"test_setup_code": "import no_such_module"}, "setup.*no_such_module"),
        (
            ["assert g(1)"],
            {"test_setup_code": "class A:\n    value = g(1)"},
            "setup of the tests calls the pro",
        ),
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
    with pytest.raises(DataError, match=r"test 1: (PermissionError|FileNotFoundError)"):
        verdict_of(isolated, "def f(x): return x", tests)


NUMPY = """import numpy as np

def same(given, expected):
    assert np.allclose(given, expected, rtol=1e-7, atol=1e-6)

def check(candidate):
    for size in (1, 2, 3):
        same(candidate(list(range(size))), np.arange(size) * 2)
"""


def test_tests_and_programs_may_import_numpy(any_level: Sandbox) -> None:
    right = "def double(items): return [2 * each for each in items]"
    assert verdict_of(any_level, right, NUMPY, entry_point="double").num_passed == 1
    wrong = verdict_of(any_level, right.replace("2 *", "3 *"), NUMPY, entry_point="double")
    assert (wrong.num_passed, wrong.reason) == (0, "test 1 of 1: AssertionError: ")
    array = "import numpy\ndef double(items): return 2 * numpy.array(items)"
    assert verdict_of(any_level, array, NUMPY, entry_point="double").num_passed == 1
    other = verdict_of(any_level, f"import scipy\n{right}", NUMPY, entry_point="double")
    assert (other.outcome, other.num_passed) == (ProgramOutcome.FAILED, 0)
    assert "No module named 'scipy'" in other.reason


@pytest.mark.parametrize(
    "code",
    [
        "import numpy.testing, numpy.linalg, numpy.random\nassert f(1) == 1",
        "from numpy import array\nassert (array([f(1)]) == 1).all()",
        "import numpy\nassert f(float(numpy.float64(1.0))) == 1",
    ],
)
def test_numpy_is_whole(isolated: Sandbox, code: str) -> None:
    assert verdict_of(isolated, "def f(x): return x", [code]).num_passed == 1


BROKEN = {
    "a name": ["assert nearly(f(1), 1)"],
    "a name in a branch that the answer decides": ["if f(1) != 1: pass\nelse: nearly(1)"],
    "a name in a helper": ["def near(a, b): return abs(a - b) < EPSILON\nassert near(f(1), 1)"],
    "types": ["assert f(1) == 1 + '1'"],
    "types in a loop": ["for x, y in [(1, 1), (2,)]: assert f(x) == y"],
    "a missing key": ["expected = {}\nassert f(1) == expected['one']"],
    "a reference that raises": ["def reference(x): return x / 0\nassert f(1) == reference(1)"],
    "an import behind a call": ["assert f(1) == 1\nimport no_such_module"],
    "an import of a library": ["import torch\nassert f(1) == 1"],
    "an exit": ["assert f(1) == 1\nraise SystemExit(1)"],
    "return": ["assert f(1) == 1\nreturn"],
    "a later test": ["assert f(1) == 1", "assert f(1) == undefined"],
    "no call": ["assert True"],
    "a false assert before a call": ["assert False\nassert f(1) == 1"],
    "no memory": ["x = f(1)\ny = bytearray(2**34)"],
    "no memory before a call": ["y = bytearray(2**34)\nassert f(1) == 1"],
    "an end before a call": ["import os\nos._exit(0)\nassert f(1) == 1"],
}


@pytest.mark.parametrize("name", BROKEN, ids=[name.replace(" ", "-") for name in BROKEN])
def test_a_test_that_no_program_can_pass_by_its_own_error_is_no_zero(bare: Sandbox, name: str) -> None:
    with pytest.raises(DataError):
        verdict_of(bare, "def f(x): return x", BROKEN[name], entry_point="f")


BLAMED = {
    "another type": ("def f(x): return None", ["assert f(1)[0] == 1"]),
    "a number for a list": ("def f(x): return 1", ["assert len(f(1)) == 1"]),
    "numbers for texts": ("def f(x): return [1]", ["assert ''.join(f(1)) == 'a'"]),
    "too few": ("def f(x): return []", ["assert f(1)[0] == 1"]),
    "another shape": ("def f(x): return 1", ["a, b = f(1)\nassert a == b"]),
    "a missing key": ("def f(x): return {}", ["assert f(1)['a'] == 1"]),
    "a zero": ("def f(x): return 0", ["assert 1 / f(1) == 1"]),
    "no method": ("def f(x): return 1", ["assert f(1).strip() == 'a'"]),
    "a text for numpy": (
        "def f(x): return 'a'",
        ["import numpy\nassert numpy.allclose(f(1), [1.0])"],
    ),
    "a list of texts for numpy": (
        "def f(x): return ['a']",
        ["import numpy\nassert numpy.allclose(f(1), [1.0])"],
    ),
    "an answer that a later test uses": ("def f(x): return 0", ["x = f(1)", "assert 1 / x == 1"]),
    "a name that a branch binds": ("def f(x): return 0", ["if f(1): y = 1", "assert y == 1"]),
    "it raises the error of a name": ("def f(x): raise NameError('nearly')", ["assert f(1) == 1"]),
    "it raises the error of an import": ("def f(x): import nothing", ["assert f(1) == 1"]),
    "it raises, and the test raises again": (
        "def f(x): return 1 / 0",
        ["try:\n    f(1)\nexcept Exception as error:\n    raise ValueError from error"],
    ),
    "it uses up the memory of the tests": ("def f(x): return 2**34", ["assert len(bytearray(f(1))) == 1"]),
    "it forges a failure of the row": (
        'import os, struct\nreply = b\'{"value": ["refused", "x"]}\'\n'
        "def f(x): os.write(4, struct.pack('<Q', len(reply)) + reply); os._exit(0)",
        ["assert f(1) == 1"],
    ),
    "it ends while it is loaded": ("import os\nos._exit(1)", ["assert f(1) == 1"]),
    "it is no program": ("I cannot.", ["assert f(1) == 1"]),
}


@pytest.mark.parametrize("name", BLAMED, ids=[name.replace(" ", "-") for name in BLAMED])
def test_no_program_makes_its_tests_seem_broken(bare: Sandbox, name: str) -> None:
    """Else a model would turn what earns 0 into what is not counted."""
    code, tests = BLAMED[name]
    verdict = verdict_of(bare, code, tests, entry_point="f")
    assert verdict.num_passed < verdict.num_tests
    assert verdict.outcome is not ProgramOutcome.PASSED and verdict.reason


def test_a_slow_program_does_not_make_the_setup_of_its_tests_seem_broken(bare: Sandbox) -> None:
    tests = ["assert f(1) == 1"]
    limits = Limits(**{**LIMITS.to_json(), "wall_s": 2.0})
    code = "import time\ntime.sleep(1.5)\ndef f(x): return 2"
    setup, slow = "import time\ntime.sleep(1.2)", ["import time\ntime.sleep(0.8)\nassert f(1) == 1"]
    for test_setup_code, asserts in ((setup, tests), ("", slow)):
        verdict = verdict_of(bare, code, asserts, limits, test_setup_code=test_setup_code)
        assert (verdict.outcome, verdict.num_passed) == (ProgramOutcome.TIMED_OUT, 0)
    with pytest.raises(DataError, match="took longer"):
        verdict_of(bare, code, tests, limits, test_setup_code="import time\ntime.sleep(30)")


def test_tests_that_want_more_memory_after_an_answer_say_so(bare: Sandbox) -> None:
    verdict = verdict_of(bare, BLAMED["it uses up the memory of the tests"][0], ["bytearray(f(1))"])
    assert verdict.outcome is ProgramOutcome.OUT_OF_MEMORY
    assert verdict.reason.startswith("the tests need more memory")


PYTEST = """from solution import triple
import math

LIMIT = 9

def test_small():
    assert triple(1) == 3

def test_large():
    assert triple(LIMIT) == 27 and math.isclose(triple(0.5), 1.5)
"""


def test_functions_of_pytest_are_tests(bare: Sandbox) -> None:
    assert verdict_of(bare, "def triple(x): return 3 * x", PYTEST).num_passed == 2
    verdict = verdict_of(bare, "def triple(x): return 3", PYTEST)
    assert (verdict.num_passed, verdict.num_tests) == (1, 2)


OF_CLASSES = {
    "pytest": """from solution import triple

class TestTriple:
    def setup_method(self):
        self.x = 1

    def test_small(self):
        assert triple(self.x) == 3

    def test_large(self):
        assert triple(9) == 27
""",
    "unittest": """import unittest

class TestTriple(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.y = 9

    def setUp(self):
        self.x = 1

    def test_small(self):
        self.assertEqual(triple(self.x), 3)

    def test_large(self):
        for y in (self.y,):
            with self.subTest(y=y):
                self.assertEqual(triple(y), 27)

if __name__ == "__main__":
    unittest.main()
""",
}


@pytest.mark.parametrize("name", OF_CLASSES)
def test_methods_of_classes_are_tests(bare: Sandbox, name: str) -> None:
    assert verdict_of(bare, "def triple(x): return 3 * x", OF_CLASSES[name]).num_passed == 2
    verdict = verdict_of(bare, "def triple(x): return 3", OF_CLASSES[name])
    assert (verdict.num_passed, verdict.num_tests) == (1, 2)


def test_a_unittest_may_expect_an_exception(bare: Sandbox) -> None:
    tests = OF_CLASSES["unittest"].replace(
        "self.assertEqual(triple(self.x), 3)", "self.assertRaises(ValueError, triple, 'a')"
    )
    right = "def triple(x):\n    if x == 'a': raise ValueError\n    return 3 * x"
    assert verdict_of(bare, right, tests).num_passed == 2
    assert verdict_of(bare, "def triple(x): return 3 * x", tests).num_passed == 1


METHOD = "class Solution:\n    def twice(self, x): return 2 * x"


@pytest.mark.parametrize("code", [METHOD, "def twice(x): return 2 * x"])
@pytest.mark.parametrize(
    ("column", "columns"),
    [
        ("def check(candidate):\n    assert candidate(x=2) == 4", {"entry_point": "Solution().twice"}),
        (["assert Solution().twice(2) == 4"], {}),
        ("from solution import *\n\ndef test_twice():\n    assert twice(2) == 4\n", {}),
    ],
)
def test_tests_may_name_a_method_of_a_solution_or_import_all(
    bare: Sandbox, code: str, column: Any, columns: dict[str, Any]
) -> None:
    assert verdict_of(bare, code, column, **columns).outcome is ProgramOutcome.PASSED
    assert verdict_of(bare, code.replace("2 *", "3 *"), column, **columns).num_passed == 0


@pytest.mark.parametrize(
    "column",
    ["assert f(1) == 2\nassert f(2) == 3", '["assert f(1) == 2", "assert f(2) == 3"]', ("assert f(1) == 2",)],
)
def test_a_text_of_asserts_and_a_list_in_json_are_tests(bare: Sandbox, column: Any) -> None:
    verdict = verdict_of(bare, "def f(x): return x + 1", column)
    assert verdict.outcome is ProgramOutcome.PASSED
    assert verdict_of(bare, "def f(x): return x + 2", column).num_passed == 0
