"""What tests see of a program's enumerations, generators, exceptions, own lists, and of what it changes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from millrace_sandbox.code_asserts import read_asserts
from millrace_sandbox.code_tests import judge
from millrace_sandbox.inside.limits import Limits
from millrace_sandbox.program import ProgramOutcome
from millrace_sandbox.sandbox import Sandbox

LIMITS = Limits(cpu_s=1, wall_s=30, memory_bytes=256 * 2**20)


def verdict_of(sandbox: Sandbox, code: str, column: Any, **columns: Any) -> Any:
    tests = read_asserts(column, columns)
    assert tests is not None
    return judge(sandbox, code, tests, LIMITS)


ENUMS = """
from enum import Enum, Flag, IntEnum, StrEnum, auto
class Color(Enum):
    RED = 1
    BLUE = 2
    def other(self): return turn(self)
class Level(IntEnum):
    LOW = 1
    HIGH = 5
class Word(str, Enum):
    A = "a"
class Kind(StrEnum):
    B = "b"
class Right(Flag):
    READ = auto()
    WRITE = auto()
def turn(color): return Color.BLUE if color == Color.RED else Color.RED
def level(x): return Level.HIGH if x > 3 else Level.LOW
def name_of(x): return type(x).__name__
"""
NO_ENUMS = """
class Color:
    RED, BLUE = "red", "blue"
class Level:
    LOW, HIGH = 2, 3
class Word: A = "b"
class Kind: B = "c"
class Right: READ, WRITE = 3, 4
def turn(color): return "red"
def level(x): return 3
def name_of(x): return "str"
"""
OF_ENUMS = [
    "assert Color.RED.name == 'RED' and Color.RED.value == 1 and turn(Color.RED).name == 'BLUE'",
    "assert turn(Color.RED) == Color.BLUE == Color.RED.other() != 2",
    "assert Color(1) == Color['RED'] == Color.RED and isinstance(turn(Color.RED), Color)",
    "assert [c.name for c in Color] == ['RED', 'BLUE'] and Color.__members__.keys() == {'RED', 'BLUE'}",
    "assert Color.RED in Color and {Color.RED: 1}[Color.RED] == 1 and {turn(Color.RED)} == {Color.BLUE}",
    "assert str(Color.RED) == 'Color.RED' and repr(Color.RED) == '<Color.RED: 1>'",
    "import enum\nassert isinstance(Color.RED, enum.Enum) and issubclass(Color, enum.Enum)",
    "assert level(5).name == 'HIGH' and level(5).value == 5 and Level(1).name == 'LOW'",
    "assert level(5) == Level.HIGH == 5 > Level.LOW and Level.LOW + 1 == 2",
    "assert isinstance(level(5), Level) and isinstance(level(5), int) and name_of(level(5)) == 'Level'",
    "import enum\nassert isinstance(Level.LOW, enum.IntEnum) and [x.value for x in Level] == [1, 5]",
    "assert sorted([Level.HIGH, Level.LOW]) == [1, 5]",
    "assert f'{Level.HIGH}' == str(Level.HIGH) == '5' and repr(Level.HIGH) == '<Level.HIGH: 5>'",
    "assert Word.A == 'a' == Word.A.value and Word.A.upper() == 'A' == Word.A.name",
    "assert str(Word.A) == 'Word.A' and Word.A in ('a', 'b') and Word('a') == Word.A",
    "assert Kind.B == str(Kind.B) == 'b' and Kind.B.name == 'B'",
    "assert (Right.READ | Right.WRITE).value == 3 and Right.READ in Right.READ | Right.WRITE",
]
GENERATORS = """
def sums():
    total = 0
    while True:
        x = yield total
        if x is None: return total
        total += x
closed = []
def guarded():
    try:
        while True:
            try: yield 1
            except ValueError as error: yield str(error)
    finally: closed.append(1)
def ends(): return closed
def fails():
    yield 1
    raise ValueError("late")
class Tree:
    def __init__(self): self.xs = [1, 2]
    def add(self, x): self.xs.append(x)
    def walk(self): yield from self.xs
    def mapped(self): return map(str, self.xs)
"""
NO_GENERATORS = """
def sums():
    while True: yield 0
def guarded():
    yield from [1, 2, 3]
def ends(): return [1, 1]
def fails(): yield from [1, 2]
class Tree:
    def add(self, x): pass
    def walk(self): yield from [1, 2]
    def mapped(self): yield from ["1", "2"]
"""
OF_GENERATORS = [
    "s = sums()\nassert next(s) == 0 and s.send(3) == 3 and s.send(4) == 7",
    "s = sums()\nassert s.send(None) == 0 and s.send(3) == 3\n"
    "try:\n    next(s)\n    assert 0\nexcept StopIteration as end: assert end.value == 3",
    "def own():\n    return (yield from sums())\ns = own()\nnext(s)\ns.send(5)\n"
    "try:\n    next(s)\n    assert 0\nexcept StopIteration as end: assert end.value == 5",
    "g = guarded()\nnext(g)\nassert g.throw(ValueError('a')) == 'a' and ends() == []\n"
    "g.close()\nassert ends() == [1] and list(g) == []",
    "g = guarded()\nnext(g)\ndel g\nassert ends() == [1]",
    "import pytest\ng = fails()\nassert next(g) == 1\nwith pytest.raises(ValueError): next(g)",
    "t = Tree()\nw, m = t.walk(), t.mapped()\nassert next(w) == 1 and next(m) == '1'\nt.add(3)\n"
    "assert [*w] == [2, 3] and [*m] == ['2', '3']",
]
OWN = """
class Numbers(list):
    def summed(self): return sum(self)
class Table(dict):
    def __missing__(self, key): return key
    def best(self): return max(self.values())
class Point(collections.namedtuple("Point", "x y")):
    def norm(self): return self.x + self.y
class Degrees(float):
    def doubled(self): return self * 2
class Low(ValueError): pass
class View(collections.abc.Sequence):
    def __len__(self): return 2
    def __getitem__(self, i): return [5, 6][i]
    def first(self): return self[0]
def moved(point): return Point(point.x + 1, point.y)
"""
NO_OWN = """
class Numbers:
    def __init__(self, *_): pass
    def summed(self): return 3
class Table(Numbers): best = lambda self: 1
class Point:
    def __init__(self, *_): self.x = 1
    def norm(self): return 3
class Degrees(Point): pass
class Low(Point): pass
class View(Point): first = lambda self: 5
def moved(point): return (2, 2)
"""
OF_OWN = [
    "x = Numbers([1, 2])\nassert isinstance(x, list) and x.summed() == 3 and x == [1, 2]",
    "x = Numbers([1])\nx.append(2)\nassert x.summed() == 3 and len(x) == 2 and x[0] == 1 and [*x] == [1, 2]",
    "x = Table(a=1)\nassert isinstance(x, dict) and x['b'] == 'b' and x.best() == 1",
    "p = Point(1, 2)\nassert isinstance(p, tuple) and p.norm() == 3 and p == (1, 2) and p.x == 1",
    "x, y = moved(Point(1, 2))\nassert (x, y) == (2, 2) and moved(Point(1, 2)).norm() == 4",
    "assert isinstance(moved(Point(0, 0)), Point) and Point(0, 0).__class__ == Point",
    "d = Degrees(2)\nassert isinstance(d, float) and d.doubled() == 4 and d == 2.0",
    "e = Low('a')\nassert isinstance(e, ValueError) and e.args == ('a',) and str(e) == 'a'",
    "import collections.abc as abc\nv = View()\nassert isinstance(v, abc.Sequence) and v.first() == 5",
]
ERRORS = """
class Low(Exception):
    def __init__(self, need):
        super().__init__(need)
        self.need = need
def f(x):
    try: {}[x]
    except KeyError as error:
        if x == 0: raise Low(3) from error
        if x == 1: raise ValueError("v", 2)
        if x == 2: raise ValueError("v", 2) from None
    error = ValueError("v")
    error.add_note("n")
    raise error
"""
NO_ERRORS = "class Low(Exception): need = 3\ndef f(x): raise (ValueError('v', 3) if x else Low(3))"
OF_ERRORS = [
    "with pytest.raises(Low) as e: f(0)\nassert isinstance(e.value.__cause__, KeyError) and e.value.need\n"
    "assert e.value.__cause__.args == (0,) and e.value.__suppress_context__",
    "with pytest.raises(ValueError) as e: f(1)\nassert e.value.args == ('v', 2) and not e.value.__cause__\n"
    "assert isinstance(e.value.__context__, KeyError) and not e.value.__suppress_context__",
    "with pytest.raises(ValueError) as e: f(2)\nassert e.value.__cause__ is None\n"
    "assert isinstance(e.value.__context__, KeyError) and e.value.__suppress_context__",
    "with pytest.raises(ValueError) as e: f(3)\nassert e.value.__notes__ == ['n']",
]
LISTS = """
class Stack:
    def __init__(self): self.items, self.sizes = [], {"now": [0]}
    def push(self, x):
        self.items.append(x)
        self.sizes["now"][0] += 1
        return self
    def get(self): return self.items
    def copied(self): return list(self.items)
    def size(self): return len(self.items)
    def fail(self):
        self.items.append(9)
        raise ValueError
def kept(x, before=[]):
    before.append(x)
    return before
"""
NO_LISTS = LISTS.replace("[], {", "[7], {").replace("before.append(x)", "before = [x]")
OF_LISTS = [
    "s = Stack()\nxs = s.items\ns.push(1)\nassert xs == [1] and s.size() == 1",
    "s = Stack()\nxs = s.get()\ns.push(1).push(2)\nassert xs == [1, 2] == s.get()",
    "s = Stack()\ns.get().append(3)\nassert s.size() == 1 and s.items == [3]",
    "s = Stack()\ns.copied().append(3)\nassert s.size() == 0",
    "s = Stack()\nall, one = s.sizes, s.sizes['now']\ns.push(1)\nassert all == {'now': [1]} and one == [1]\n"
    "one[0] = 5\nassert s.push(2).sizes == {'now': [6]} and s.size() == 2",
    "s = Stack()\na, b = s.items, s.items\na.append(1)\nassert b == [1] and s.size() == 1",
    "s = Stack()\nxs = s.items\ntry:\n    s.fail()\nexcept ValueError: xs.append(2)\nassert s.size() == 2",
    "a = kept(1)\nb = kept(2)\nassert a == [1, 2] == b",
]
KEPT = """
import threading
class Shelf:
    def __init__(self, books=(), pages=()):
        self.books, self.pages, self.count = books, iter(pages), 1
    def add(self, x): self.books.append(x); return len(self.books)
    def turn(self): return next(self.pages)
    def mark(self, table): table["lock"] = threading.Lock(); return 1
    def best(self): return max(self.books)
class Copies(Shelf):
    def __init__(self, books): super().__init__(list(books))
"""
NO_KEPT = """
class Copies:
    def __init__(self, books=(), pages=()):
        self.books, self.count = books, 2
    def add(self, x): self.books.append(x); return len(self.books)
    def turn(self): return 0
    def mark(self, table): return 2
    def best(self): return 0
class Shelf(Copies):
    def __init__(self, books=(), pages=()): super().__init__(list(books))
"""
OF_KEPT = [
    "xs = [1]\ns = Shelf(xs)\ns.add(2)\nassert xs == [1, 2] and s.count == 1",
    "xs = [1]\ns = Shelf(xs)\nxs.append(2)\nassert s.best() == 2 and s.count == 1",
    "xs = [1]\ns = Shelf(xs)\nassert s.add(2) == 2 and s.add(3) == 3 and xs == [1, 2, 3] and s.count == 1",
    "xs = [1]\nc = Copies(xs)\nc.add(2)\nassert xs == [1] and c.count == 1",
    "xs = [1]\nc = Copies(xs)\nxs.append(2)\nassert c.best() == 1 and c.count == 1",
    "s = Shelf([], (x for x in [4, 5]))\nassert s.turn() == 4 and s.turn() == 5 and s.count == 1",
    "s = Shelf()\nassert s.mark({}) == 1 == s.count",
]
CASES = [
    *((ENUMS, NO_ENUMS, test) for test in OF_ENUMS),
    *((GENERATORS, NO_GENERATORS, test) for test in OF_GENERATORS),
    *((OWN, NO_OWN, test) for test in OF_OWN),
    *((ERRORS, NO_ERRORS, f"import pytest\n{test}") for test in OF_ERRORS),
    *((LISTS, NO_LISTS, test) for test in OF_LISTS),
    *((KEPT, NO_KEPT, test) for test in OF_KEPT),
]


@pytest.mark.parametrize(("right", "wrong", "test"), CASES, ids=range(len(CASES)))
def test_a_right_program_passes_as_in_python_and_a_wrong_one_does_not(
    bare: Sandbox, right: str, wrong: str, test: str
) -> None:
    names = re.findall(r"^(?:def|class) (\w+)", right, re.MULTILINE)
    tests = f"from solution import {', '.join(names)}\n{test}"
    verdict = verdict_of(bare, right, tests)
    assert verdict.outcome is ProgramOutcome.PASSED, verdict.reason
    assert verdict_of(bare, wrong, tests).num_passed == 0


def test_only_what_a_test_holds_last_is_the_same_here_and_there(bare: Sandbox) -> None:
    """Small lists, and so few that many calls cost no more."""
    test = "xs = kept(0)\nys = [kept(n) for n in range(1, 500)]\nassert len(xs) == 500 and xs == ys[-1]"
    assert verdict_of(bare, LISTS, test, entry_point="kept").num_passed == 1
    test = "xs = [Stack().push(n).items for n in range(500)]\nassert xs[7] == [7] and xs[499] == [499]"
    assert verdict_of(bare, LISTS, f"from solution import Stack\n{test}").num_passed == 1


def test_no_object_changes_both_sides_of_a_comparison(bare: Sandbox) -> None:
    empties = """
class Sorter:
    size = 0
    def __init__(self, xs=()): self.xs = xs
    def sorted(self): self.xs.clear(); return []
"""
    test = "xs = [2, 1]\ns = Sorter(xs)\nassert s.sorted() == sorted(xs) and s.size == 0"
    assert verdict_of(bare, empties, f"from solution import Sorter\n{test}").num_passed == 0
