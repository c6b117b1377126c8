"""Tests of a row that use several functions of a program, its classes, and objects of these."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.core.errors import DataError
from millrace_sandbox.code_asserts import read_asserts
from millrace_sandbox.code_tests import judge, read_tests
from millrace_sandbox.inside.limits import Limits
from millrace_sandbox.program import ProgramOutcome
from millrace_sandbox.sandbox import Sandbox

LIMITS = Limits(cpu_s=1, wall_s=30, memory_bytes=256 * 2**20)


def verdict_of(sandbox: Sandbox, code: str, column: Any, given: str = "", **columns: Any) -> Any:
    asserts = read_asserts(column, columns, None, given)
    tests = asserts or read_tests(column, None, columns)
    return judge(sandbox, code, tests, LIMITS, given=asserts.given if asserts else "")


STACK = """
class Stack:
    made = 0
    def __init__(self, items=()): self.items = list(items); Stack.made += 1
    def push(self, x): self.items.append(x); return self
    def pop(self): return self.items.pop()
    def count(self, x): return self.items.count(x)
    def swap(self, xs): xs.reverse(); return len(xs)
    def __len__(self): return len(self.items)
    def __contains__(self, x): return x in self.items
    def __getitem__(self, i): return self.items[i]
    def __eq__(self, other): return self.items == list(other)
    def __add__(self, other): return Stack(self.items + other.items)
    def __enter__(self): return self
    @property
    def tops(self): return self.items[-1:]
    @staticmethod
    def joined(xs): return "".join(xs)
    @classmethod
    def again(cls, stack):
        made = cls()
        made.items = stack.items
        return made
"""
NODE = """
class Node:
    def __init__(self, val, next=None): self.val, self.next = val, next
def turned(node):
    last = None
    while node: node.next, last, node = last, node, node.next
    return last
def has_cycle(node):
    seen = []
    while node and node not in seen: seen.append(node); node = node.next
    return node is not None
def start(node):
    seen = []
    while node not in seen: seen.append(node); node = node.next
    return node
def insert(node, val): return Node(val, node)
def adder(n): return lambda x: x + n
"""
KINDS = """
class Cache(OrderedDict):
    def __init__(self, size): super().__init__(); self.size = size
    def put(self, k, v):
        self[k] = v
        if len(self) > self.size: self.popitem(last=False)
class Down:
    def __init__(self, n): self.n = n
    def __iter__(self): return self
    def __next__(self):
        if not self.n: raise StopIteration
        self.n -= 1
        return self.n
class Point:
    def __init__(self, x): self._number, self.log = x, []
    def __iadd__(self, x): self._number += x; return self
    def __eq__(self, other): return type(other) is Point and other._number == self._number
    def __format__(self, form): return f"{self._number}:{form}"
    def __enter__(self): return self
    def __exit__(self, kind, *_): self._number = kind; return True
    def __divmod__(self, x): return divmod(self._number, x)
class Far(Point): pass
def naturals():
    n = 0
    while True: yield n; n += 1
"""
RIGHT = {
    "a class above which is a built-in one": (
        KINDS,
        "c = Cache(1)\nc.put(1, 2)\nc.put(3, 4)\nassert c == {3: 4}",
    ),
    "an iterator with attributes": (KINDS, "d = Down(3)\nassert next(d) == 2 == d.n and [*d] == [1, 0]"),
    "an iterator without end": (
        KINDS,
        "import types\nn = naturals()\nassert [next(n) for _ in range(300)] == [*range(300)]\n"
        "assert isinstance(n, types.GeneratorType)",
    ),
    "an assignment with an operator": (
        KINDS,
        "p = Point(1)\np += 2\nassert p._number == 3 and divmod(p, 2) == (1, 1)",
    ),
    "a format": (KINDS, "p = Point(1)\nassert f'{p:x}' == '1:x' and p._number"),
    "with": (
        KINDS,
        "with Point(1) as p:\n    assert p._number == 1\n    {}['a']\nassert p._number == KeyError",
    ),
    "a type": (
        KINDS,
        "assert type(Far(1)) == Far != Point and type(Far(1)) == type(Far(2)) != type(Point(1))\n"
        "assert issubclass(Far, Point) and not issubclass(Point, Far) and Far.__name__ == 'Far'",
    ),
    "a class that is only asked about": (
        KINDS,
        "assert isinstance(Far(1), Point) and not isinstance(Down(1), Far)",
    ),
    "a table of attributes": (
        KINDS,
        "p = Point(1)\ndel p.log\nassert vars(p) == p.__dict__ == {'_number': 1}",
    ),
    "another name": (KINDS, "from solution import Point as P\nassert P(1)._number == 1"),
    "a name that arrays have, too": (KINDS, "c = Cache(1)\nassert c.put(1, 2) == None and c == {1: 2}"),
    "copies": (
        KINDS,
        "import copy\np = Point(1)\nq, r = copy.copy(p), copy.deepcopy(p)\nq.log.append(2)\nr += 1\n"
        "assert p.log == [2] and p._number == 1 and p == q != r",
    ),
    "methods": (STACK, "s = Stack()\ns.push(1)\ns.push(2)\nassert s.pop() == 2 and s.pop() == 1"),
    "a method that a text has, too": (STACK, "s = Stack([1])\ns.push(1)\nassert s.count(1) == 2"),
    "a call of what a call gives": (STACK, "assert Stack().push(1).push(2).pop() == 2"),
    "attributes": (STACK, "s = Stack([1])\ns.items = [3]\nassert s.items == [3] and s.pop() == 3"),
    "an attribute that a test changes": (STACK, "s = Stack()\ns.items.append(4)\nassert s.pop() == 4"),
    "one that two objects share": (
        STACK,
        "s = Stack()\nu = Stack.again(s)\nu.items.append(4)\nassert s.pop() == 4",
    ),
    "one that is made anew": (STACK, "s = Stack()\ns.tops.append(4)\nassert s.push(1).tops == [1]"),
    "one that it sets after a change": (
        STACK,
        "s = Stack()\ns.items.append(4)\ns.items = []\nassert len(s) == 0 and s.push(1).pop() == 1",
    ),
    "operators": (
        STACK,
        "s = Stack([1])\ns.push(2)\nassert len(s) == 2 and 1 in s and s[1] == 2 and list(s) == [1, 2]",
    ),
    "a sum": (STACK, "s = Stack([1]) + Stack([2])\nassert s.items == [1, 2] and s == Stack([1, 2])"),
    "attributes of a class": (STACK, "Stack()\nassert Stack.made == 1 and Stack.joined(['a', 'b']) == 'ab'"),
    "instances": (STACK, "s = Stack()\nassert isinstance(s.push(1), Stack) and not isinstance(1, Stack)"),
    "an argument that a method changes": (
        STACK,
        "s = Stack()\nxs = [1, 2]\nassert s.swap(xs) == 2\nassert xs == [2, 1]",
    ),
    "a unittest": (
        STACK,
        "import unittest\nclass TestStack(unittest.TestCase):\n    def setUp(self): self.s = Stack([5])\n"
        "    def test_pop(self): self.assertEqual(self.s.pop(), 5)\n"
        "    def test_len(self): self.assertEqual(len(self.s), 1)\n",
    ),
    "objects as arguments": (
        NODE,
        "from solution import Node, turned\nhead = turned(Node(1, Node(2)))\n"
        "assert head.val == 2 and head.next.val == 1",
    ),
    "objects that go round": (
        NODE,
        "from solution import Node, has_cycle, start\na, b = Node(1), Node(2)\n"
        "a.next, b.next = b, a\nassert has_cycle(a) and start(a) == a",
    ),
    "what a function gave as an argument": (
        NODE,
        "from solution import insert, turned\nassert turned(insert(insert(None, 1), 2)).val == 1",
    ),
    "a function that a function gives": (NODE, "assert adder(2)(3) == 5"),
    "several functions": (
        NODE,
        "from solution import has_cycle, insert\nassert not has_cycle(insert(None, 1))",
    ),
    "a function that is passed": (NODE, "def tried(f):\n    assert f(2)(3) == 5\ntried(adder)"),
    "tests that call themselves": (NODE, "def test_adder():\n    assert adder(1)(1) == 2\ntest_adder()"),
    "pytest": (
        STACK,
        "import pytest\ndef test_pop():\n    with pytest.raises(IndexError, match='empty') as error:\n"
        "        Stack().pop()\n"
        "    assert 'pop' in str(error.value)\n    assert Stack([0.1 + 0.2]).pop() == pytest.approx(0.3)\n"
        "    assert [0.1 + 0.2] == pytest.approx([0.3]) and {'a': 3} != pytest.approx({'a': 3.1})\n"
        "@pytest.mark.parametrize('x', [1, 2])\n@pytest.mark.parametrize('y, z', [(3, 4), (5, 6)])\n"
        "def test_push(x, y, z):\n    assert x < 3 and Stack([y]).push(x).pop() == x and z - y == 1\n",
    ),
}


@pytest.mark.parametrize("name", RIGHT, ids=[name.replace(" ", "-") for name in RIGHT])
def test_tests_use_the_classes_and_functions_of_a_program(bare: Sandbox, name: str) -> None:
    code, tests = RIGHT[name]
    verdict = verdict_of(bare, code, tests)
    assert verdict.outcome is ProgramOutcome.PASSED, verdict.reason
    for wrong in (
        "class Stack: pass\nclass Node: pass",
        "def adder(n): pass\nturned = has_cycle = insert = adder\ndef naturals(): yield 1",
    ):
        assert verdict_of(bare, wrong, tests).outcome is ProgramOutcome.FAILED


def test_a_prompt_says_what_is_a_class(bare: Sandbox) -> None:
    code = (
        "class Bag:\n    def __init__(self, x): self.x = x\n    def __contains__(self, x): return x in self.x"
    )
    tests = "assert 1 in Bag([1]) and 2 not in Bag([1])"
    assert verdict_of(bare, code, tests, "Write a class `Bag`.").num_passed == 1
    assert verdict_of(bare, code, tests, "Write a function `Bag`.").num_passed == 0


LIAR = """
class Liar:
    def __init__(self, *args, **keywords): pass
    def yes(self, *args): return True
    def me(self, *args): return self
    def zero(self, *args): return 0
    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = yes
    startswith = endswith = issubset = isdigit = yes
    __ne__ = lambda self, *args: False
    __sub__ = __rsub__ = __mod__ = __rmod__ = __pow__ = __truediv__ = __xor__ = __rxor__ = zero
    __abs__ = __getitem__ = __add__ = __neg__ = me
    sort = append = push = pop = items = name = get = equals = close = me
    def __getattr__(self, name): return self.me
    def __hash__(self): return 0
    def __len__(self): return 0
    def __float__(self): return 0.0
    def __iter__(self): return iter([self])
f = F = Stack = Liar
"""
LIES = [
    "assert f(1) == 2",
    "assert abs(f(1) - 2) < 1e-6",
    "assert abs(2 - f(1)) < 1e-6",
    "assert f(1) % 7 == 2 or 3 ^ f(1) == 2",
    "assert 2 in f(1)",
    "assert f(1) in (2, 3)",
    "assert f(1) < 3",
    "assert f(1).startswith('a')",
    "assert f(1).equals([2])",
    "assert {2}.issubset(f(1)) or f(1).issubset({2})",
    "import math\nassert math.isclose(f(1), 2.0)",
    "import numpy\nassert numpy.allclose(f(1), [2.0])",
    "import numpy\nassert (f(1) == numpy.array([1, 2])).all()",
    "import unittest\nclass T(unittest.TestCase):\n    def test_f(self): self.assertAlmostEqual(f(1), 2.0)",
    "import pytest\ndef test_f():\n    assert f(1) == pytest.approx(2.0)",
    "x = F(1)\nx.sort()\nassert x == [2]",
    "x = F(1)\nassert len(x) == 1 and x[0] == 2",
    "s = Stack()\ns.push(1)\nassert s.pop() == 1",
    "s = Stack()\ns.push(1)\nassert s[0] == 1 or s + 1 == 1 or -s == 1 or abs(s) == 1",
    "s = Stack()\ns.push(1)\nassert 1 in s.items()",
    "s = Stack()\ns.push(1)\nassert s.name().startswith('a')",
    "s = Stack()\ns.push(1)\nassert abs(s.pop() - 1) < 1e-6",
]


@pytest.mark.parametrize("test", LIES)
def test_an_object_that_says_yes_to_everything_passes_no_test(bare: Sandbox, test: str) -> None:
    verdict = verdict_of(bare, LIAR, test)
    assert verdict.num_passed == 0 and verdict.outcome is not ProgramOutcome.PASSED


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("f = lambda x: collections.namedtuple('P', 'startswith')(bool)", "assert f(1).startswith('a')"),
        ("f = lambda x: collections.namedtuple('P', 'get')(lambda *_: 2)", "assert f(1).get('a') == 2"),
        ("def f(x): p = Pair(1); p.equals = bool; return p", "assert f(1).equals(Pair(2)) and pair(1)"),
        (
            "class Pair:\n    def __enter__(self): return 4\n    def __exit__(self, *_): return True",
            "with Pair() as x:\n    assert x == 5",
        ),
    ],
)
def test_nothing_else_says_yes_either(bare: Sandbox, code: str, test: str) -> None:
    given = (
        "class Pair:\n    def __init__(self, x): self.x = x\n    def equals(self, y): return self.x == y.x\n"
    )
    prompt = f"{given}def pair(x): return Pair(x)\n" if "pair" in test else ""
    assert verdict_of(bare, code, test, prompt, entry_point="" if "with" in test else "f").num_passed == 0


LISTS = """
class ListNode:
    def __init__(self, val=0, next=None): self.val, self.next = val, next
def list_node(values):
    return ListNode(values[0], list_node(values[1:])) if values else None
def is_same_list(a, b):
    return a is b is None or bool(a and b) and a.val == b.val and is_same_list(a.next, b.next)
"""
TURN = """
class Solution:
    def turned(self, head):
        last = None
        while head:
            head.next, last, head = last, head, head.next
        return last
"""
TURNED = "assert is_same_list(candidate(head=list_node([1, 2, 3])), list_node([3, 2, 1]))"


@pytest.mark.parametrize(
    "own", ["", "class ListNode:\n    def __init__(self, val=0, next=None): self.val = val\n"]
)
@pytest.mark.parametrize("column", ["prompt", "another"])
def test_classes_of_the_prompt_are_those_of_the_program_and_of_its_tests(
    bare: Sandbox, own: str, column: str
) -> None:
    """As LeetCodeDataset has them, whose column `prompt` is this code."""
    code = f"{own}{TURN}"
    row = {"entry_point": "Solution().turned", column: LISTS}
    tests = f"def check(candidate):\n    {TURNED}\n"
    prompt = "Turn the list." if column == "prompt" else LISTS
    verdict = verdict_of(bare, code, tests, prompt, **row)
    assert verdict.outcome is ProgramOutcome.PASSED, verdict.reason
    wrong = "is_same_list = lambda a, b: True\ndef turned(head): return head"
    assert verdict_of(bare, wrong, tests, prompt, **row).num_passed == 0


ERRORS = """
class BankError(Exception): pass
class Low(BankError, ValueError):
    def __init__(self, need):
        super().__init__(need)
        self.need = need
    def __str__(self): return f"low by {self.need}"
def f(x):
    if x == 1: raise Low(5)
    if x == 2: raise KeyError("b", 2)
    if x == 3: raise StopIteration(7)
    return b"\\xff".decode() if x == 4 else "a" * 1000 if x else [].nothing
"""
CAUGHT = [
    "with pytest.raises(Low, match='by 5') as e: f(1)\nassert e.value.need == 5 and e.type.__name__ == 'Low'",
    "with pytest.raises(BankError) as e: f(1)\nassert isinstance(e.value, Low) and e.value.args == (5,)",
    "with pytest.raises((TypeError, ValueError)) as e: f(1)\nassert str(e.value) == 'low by 5'",
    "try:\n    f(1)\n    assert False\nexcept (KeyError, Low) as e: assert e.need == 5",
    "with pytest.raises(KeyError) as e: f(2)\nassert e.value.args == ('b', 2)",
    "with pytest.raises(StopIteration) as e: f(3)\nassert e.value.value == 7",
    "with pytest.raises(UnicodeDecodeError): f(4)",
]


@pytest.mark.parametrize("test", CAUGHT)
def test_an_exception_has_its_classes_its_text_and_its_attributes(bare: Sandbox, test: str) -> None:
    tests = f"import pytest\n{test}"
    verdict = verdict_of(bare, ERRORS, tests, entry_point="f")
    assert verdict.outcome is ProgramOutcome.PASSED, verdict.reason
    for wrong in ("def f(x): raise Exception('low by 5')", "def f(x): return 5"):
        assert verdict_of(bare, wrong, tests, entry_point="f").num_passed == 0


def test_an_exception_that_tests_catch_and_make_is_refused(bare: Sandbox) -> None:
    tests = "try:\n    f(1)\nexcept Low as e:\n    assert e == Low(5)"
    with pytest.raises(DataError, match="catches the program's exception 'Low', and can do nothing else"):
        verdict_of(bare, ERRORS, tests, entry_point="f")


def test_a_function_or_a_class_that_the_prompt_only_begins_is_the_programs(bare: Sandbox) -> None:
    prompt = "class Stack:\n    def push(self, x):\n        '''Push.'''\n\ndef top(stack):\n    pass\n"
    tests = "from solution import Stack, top\ns = Stack()\ns.push(2)\nassert top(s) == 2"
    code = f"{STACK}\ndef top(stack): return stack.items[-1]"
    assert verdict_of(bare, code, tests, prompt).outcome is ProgramOutcome.PASSED


FORMS = {
    "rLLM": {"functional": "def check(candidate):\n    assert candidate(1) == 2\n\n\ncheck(Solution().f)"},
    "verl": '{"fn_name": "f", "assert_case": ["assert f(1) == 2"]}',
    "PRIME": "my_solution = Solution()\ntest_input = {'x': 1}\nassert my_solution.f(**test_input) == 2",
}


@pytest.mark.parametrize("name", FORMS)
def test_the_forms_of_public_sets_of_a_function(bare: Sandbox, name: str) -> None:
    right = "class Solution:\n    def f(self, x): return x + 1\nf = Solution().f"
    assert verdict_of(bare, right, FORMS[name]).outcome is ProgramOutcome.PASSED
    assert verdict_of(bare, right.replace("+", "-"), FORMS[name]).num_passed == 0


def test_a_program_may_use_what_the_prompt_imports(bare: Sandbox) -> None:
    tests = "def check(candidate):\n    assert candidate([3, 1]) == 1"
    code = "class Solution:\n    def least(self, xs): return sorted_list(xs)[0]"
    row = {"entry_point": "Solution().least", "prompt": "from builtins import sorted as sorted_list"}
    assert verdict_of(bare, code, tests, **row).outcome is ProgramOutcome.PASSED
    row["prompt"] = "sorted_list\nprint('an example')"
    assert verdict_of(bare, code, tests, **row).num_passed == 0


def test_a_class_of_the_prompt_may_be_written_anew(bare: Sandbox) -> None:
    """As row 45 of the samples of KodCode."""
    prompt = "class Node:\n    def __init__(self, value): self.value = value\n\ndef turned(node):\n    pass\n"
    tests = "def test_turned():\n    a = Node(1, Node(2))\n    assert turned(a).val == 2"
    for row in ({}, {"entry_point": "turned"}):
        assert verdict_of(bare, NODE, tests, prompt, **row).outcome is ProgramOutcome.PASSED
        assert verdict_of(bare, "def turned(n): return n", tests, prompt, **row).num_passed == 0


def test_a_setup_may_make_objects_of_the_program(bare: Sandbox) -> None:
    """As that of row 367 of MBPP."""
    setup, tests = "a = Node(1)\na.next = Node(2)", ["assert turned(a).val == 2", "assert turned(a).val == 1"]
    assert verdict_of(bare, NODE, tests, test_setup_code=setup).outcome is ProgramOutcome.PASSED
    verdict = verdict_of(bare, "class Node: pass\ndef turned(n): return n", tests, test_setup_code=setup)
    assert verdict.num_passed == 0 and verdict.outcome is ProgramOutcome.FAILED


def test_code_of_the_row_runs_before_tests_of_a_class(bare: Sandbox) -> None:
    tests = "class TestF:\n    def test_f(self): assert f(1) == math.floor(2.5)"
    for name in ("import_statement", "test_setup_code"):
        assert verdict_of(bare, "def f(x): return 2", tests, **{name: ["import math"]}).num_passed == 1
    with pytest.raises(DataError, match=r"setup of the tests fails.*no_such_module"):
        verdict_of(bare, "import no_such_module", tests, import_statement=["import no_such_module"])


@pytest.mark.parametrize(
    "test",
    [
        "open('x', 'w').write('1')\nassert f('x') == 1",
        "def test_f(capsys):\n    f(1)\n    assert capsys.readouterr().out == '1'",
        "def test_f(tmp_path):\n    assert f(tmp_path) == 1",
        "import io, sys\nsys.stdout = io.StringIO()\nf(1)\nassert sys.stdout.getvalue() == '1'",
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()): f(1)\nassert f(2)",
        "from unittest.mock import patch\nwith patch('random.random', return_value=1):\n    assert f(1) == 1",
        "import os\nos.makedirs('a')\nassert f('a') == 1",
        "import sqlite3\nassert f(1) and sqlite3.connect('x.db')",
        "def test_execution(solution):\n    exec(solution)",
    ],
)
def test_tests_that_look_into_the_process_of_a_program_are_refused(bare: Sandbox, test: str) -> None:
    with pytest.raises(DataError, match=r"share no files, no output and no patches.*Leave such rows out"):
        verdict_of(bare, "def f(x): return 1", test, entry_point="f")


@pytest.mark.parametrize("test", ["const assert = require('assert')", "}\nint main() { assert(f(1) == 2); }"])
def test_another_language_is_named_as_the_reason(bare: Sandbox, test: str) -> None:
    with pytest.raises(DataError, match=r"no Python.*other languages cannot be judged"):
        verdict_of(bare, "def f(x): return 1", test)
