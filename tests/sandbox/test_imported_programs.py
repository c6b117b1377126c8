"""Tests that import the program's module, in any way, and tests that only say that it raises."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.core.errors import DataError
from millrace_sandbox.code_asserts import read_asserts
from millrace_sandbox.code_tests import judge
from millrace_sandbox.inside.limits import Limits
from millrace_sandbox.program import ProgramOutcome
from millrace_sandbox.sandbox import Sandbox

LIMITS = Limits(cpu_s=1, wall_s=30, memory_bytes=256 * 2**20)
RIGHT = """
class Low(Exception): pass
def f(x):
    if x < 0: raise ValueError("negative")
    return x + 1
def g(x): raise Low("low")
"""
WRONG = "def f(x): return 7\ng = f"


def verdict_of(sandbox: Sandbox, code: str, column: Any, **columns: Any) -> Any:
    tests = read_asserts(column, columns)
    assert tests is not None
    return judge(sandbox, code, tests, LIMITS)


CASE = "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        "
READ = {
    "raises-in-a-block": f"{CASE}with self.assertRaises(ValueError): f(-1)",
    "raises-by-a-call": f"{CASE}self.assertRaises(ValueError, f, -1)",
    "raises-with-a-text": f"{CASE}self.assertRaisesRegex(ValueError, 'neg', f, -1)",
    "raises-its-own": f"{CASE}self.assertRaises(Low, g, 1)",
    "pytest-by-a-call": "import pytest\ndef test_f():\n    pytest.raises(ValueError, f, -1)",
    "module": "import solution\ndef test_f():\n    assert solution.f(1) == 2",
    "module-by-another-name": "import solution as s\ndef test_f():\n    assert s.f(1) == 2 and s.f(2) == 3",
    "module-in-a-function": "def test_f():\n    import solution\n    assert solution.f(1) == 2",
    "module-and-exception": "import solution, pytest\ndef test_g():\n"
    "    with pytest.raises(solution.Low): solution.g(1)",
    "names-in-a-function": "def test_f():\n    from solution import f as h\n    assert h(1) == 2",
    "in-a-package": "from src.solution import f\ndef test_f():\n    assert f(1) == 2",
    "in-this-package": "from .solution import f\nassert f(1) == 2",
    "both": "import solution\nfrom solution import f\nassert f(1) == 2 == solution.f(1)",
    "a-list": ["import solution\nassert solution.f(1) == 2", "assert solution.f(2) == 3"],
    "another-module": "from calc import f\nimport math\ndef test_f():\n    assert f(1) == math.floor(2.5)",
    "two-of-another": "from calc import Low\nfrom calc import f, g\nimport pytest\ndef test_g():\n"
    "    assert f(1) == 2\n    with pytest.raises(Low): g(1)",
}


@pytest.mark.parametrize("name", READ)
def test_tests_import_the_program_or_say_that_it_raises(bare: Sandbox, name: str) -> None:
    verdict = verdict_of(bare, RIGHT, READ[name])
    assert verdict.outcome is ProgramOutcome.PASSED, verdict.reason
    assert verdict_of(bare, WRONG, READ[name]).num_passed == 0


def test_a_row_names_the_function_of_another_module(bare: Sandbox) -> None:
    tests = "from calc import f\nfrom other import h\nassert f(1) == 2"
    with pytest.raises(DataError, match=r"cannot be run.*No module named 'other'"):
        verdict_of(bare, RIGHT, tests, entry_point="f")
    assert verdict_of(bare, RIGHT, tests.replace("from other import h", ""), entry_point="f").num_passed == 1


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        ("import torch\ndef test_f():\n    assert f(1) == torch.f(1)", "No module named 'torch'"),
        (
            "from scipy.special import comb\ndef test_f():\n    assert f(5) == comb(4, 2)",
            "No module named 'scipy'",
        ),
        ("from solution import f\nfrom hypothesis import given\nassert f(1)", "No module named 'hypothesis'"),
        (
            "from calc import f\nfrom helper import h\nassert f(1) == h(1)",
            "`entry_point`.*import it from `solution`",
        ),
    ],
)
def test_a_module_that_nobody_has_is_the_reason(bare: Sandbox, tests: str, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        verdict_of(bare, RIGHT, tests)
