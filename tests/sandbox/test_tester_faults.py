"""What the process of the tests cannot do is no fault of a program: it is a failure with a reason."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.core.errors import DataError, SandboxError
from millrace_sandbox import sandbox as module
from millrace_sandbox.code_asserts import read_asserts
from millrace_sandbox.code_tests import judge
from millrace_sandbox.inside.limits import Limits
from millrace_sandbox.sandbox import Sandbox

LIMITS = Limits(cpu_s=1, wall_s=30, memory_bytes=256 * 2**20)
BAG = """
class Bag:
    def __init__(self, items=()): self.items = list(items)
    def __len__(self): return len(self.items)
    def __iadd__(self, x): self.items.append(x); return self
    def add(self, x): self.items.append(x)
def f(x): return x
"""


def verdict_of(sandbox: Sandbox, code: str, column: Any, **columns: Any) -> Any:
    tests = read_asserts(column, columns)
    assert tests is not None
    return judge(sandbox, code, tests, LIMITS)


FAULTS = {
    "objects._ask": "b = Bag([1])\nassert len(b) == 1",
    "objects._same": "b = Bag([1])\nb += 2\nassert isinstance(b, Bag)",
    "tester.encoded": "b = Bag([1])\nassert b.items == [1]",
    "tester.write_back": "b = Bag([1])\nb.add([2])\nassert b.items == [1, [2]]",
    "tester.changed": "b = Bag([1])\nassert b.items == [1]",
    "tester.exchange": "b = Bag([1])\ntry:\n    len(b)\nexcept Exception:\n    b.add(2)\nassert len(b) == 2",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_tester_is_a_failure_and_no_zero(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each function fails once the test runs. Before, it works: the process would not start without it."""
    file, _, function = name.partition(".")
    broken = (
        f"import millrace_sandbox.inside.{file} as one; kept = one.{function}; "
        "is_tested = lambda at: at and (at.f_code.co_filename == 'tests' or is_tested(at.f_back)); "
        f"one.{function} = lambda *a, **k: {{}}['gone'] if is_tested(sys._getframe()) else kept(*a, **k); "
    )
    monkeypatch.setattr(
        module, "_START", module._START.replace("del sys.path[0]; ", f"{broken}del sys.path[0]; ")
    )
    with Sandbox("limits", strongest="limits") as sandbox:
        with pytest.raises(SandboxError, match=r"fault of Millrace.*KeyError: 'gone'.*py, line"):
            verdict_of(sandbox, BAG, FAULTS[name])


BEYOND = {
    "a list in itself": "xs = [1]\nxs.append(xs)\nassert f(1) == 1\nassert f(xs) == 1",
    "a function in an attribute": "b = Bag([1])\nb.items.append(lambda x: 1)\nassert len(b) == 2",
    "an array of objects": "import numpy\nassert f(1) == 1\nassert f(numpy.array([{}], object)) == 1",
    "a slice of objects": "assert f(1) == 1\nassert f(slice(lambda x: 1)) == 1",
}


@pytest.mark.parametrize("name", BEYOND, ids=[name.replace(" ", "-") for name in BEYOND])
def test_what_cannot_be_sent_is_refused_and_no_zero(bare: Sandbox, name: str) -> None:
    with pytest.raises(DataError, match=r"the tests cannot be run.*(cannot be sent|recursion)"):
        verdict_of(bare, BAG, BEYOND[name], entry_point="f")


SENT = {
    "a long number": "assert f(10**5000) == 10**5000 and f([-(10**5000)]) == [-(10**5000)]",
    "a fraction of long numbers": "import fractions\nx = fractions.Fraction(10**5000, 3)\nassert f(x) == x",
    "a range of long numbers": "assert f(range(10**5000)) == range(10**5000)",
    "times": "import numpy\nx = numpy.array(['2024-01-01'], 'M8[D]')\nassert (f(x) == x).all()",
    "a complex number": "import pytest\nassert f(1j) == pytest.approx(1j + 1e-9) != f(2j)",
    "an array that is near": "import numpy, pytest\nx = numpy.array([1.0])\nassert f(x) == pytest.approx(x)\n"
    "assert f(x) == pytest.approx([1.0]) and f([1.0]) == pytest.approx(x) and f(x) != pytest.approx([2.0])",
    "no number": "import pytest\nx = float('nan')\nassert f(x) == pytest.approx(x, nan_ok=True) != f(1)",
    "a call that raises": "import pytest\nassert pytest.raises(TypeError, f, 1, 2).value\nassert f(1) == 1",
}


@pytest.mark.parametrize("name", SENT, ids=[name.replace(" ", "-") for name in SENT])
def test_what_a_test_of_python_may_say_is_said(bare: Sandbox, name: str) -> None:
    assert verdict_of(bare, BAG, SENT[name], entry_point="f").num_passed == 1
    wrong = "class Bag:\n    def __init__(*_): pass\ndef f(x): return 7"
    assert verdict_of(bare, wrong, SENT[name], entry_point="f").num_passed == 0


def test_a_program_has_no_part_in_a_fault(bare: Sandbox) -> None:
    """Else a model would turn what earns 0 into what is not counted."""
    forged = (
        "import os, struct\ndef f(x):\n    while True:\n"
        "        os.write(4, struct.pack('<Q', len({reply!r})) + {reply!r})\n"
        "        os.read(3, struct.unpack('<Q', os.read(3, 8))[0])"
    )
    for reply in (
        b'{"value": {"int": 3}}',
        b'{"value": {"ndarray": ["|O", [1]]}}',
        b'{"value": {"slice": [1, 2, 3, 4]}}',
        b'{"value": {"object": []}}',
        b'{"value": null, "left": [[{"no": 1}], {}]}',
        b'{"value": null, "left": [1]}',
        b'{"value": [], "number": []}',
        b'{"value": [], "held": [[7, 1]]}',
        b'{"value": [], "held": 7}',
        b'{"value": {"own": [["A", 1, 2, [["builtins", "type"]]], 1]}}',
        b'{"value": {"type": ["sys", "path"]}}',
        b'{"error": "a", "memory": false, "raised": [[], 1]}',
        b'{"error": "a", "memory": false, "raised": [["KeyError"], "a", {"no": 1}, {}]}',
        b'{"value": 5, "number": 1}',
        b'{"value": {"type": ["builtins", "len"]}}',
        b'{"value": [{"type": ["builtins", "len"]}], "number": 1}',
        b'{"value": null, "left": [[5], {}], "given": [1]}',
    ):
        tests = [
            "x = f(1)\nf(x)\nassert x == 1",
            "assert f(1) == 1",
            "xs = [2]\nk = f(xs)\nf(2)\nassert xs == [3]",
        ]
        verdict = verdict_of(bare, forged.format(reply=reply), tests)
        assert verdict.num_passed == 0 and verdict.reason
