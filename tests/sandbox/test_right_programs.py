"""Right programs as people write them: what they return, change, read, import and leave out."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from millrace.core.errors import DataError
from millrace_sandbox.code_asserts import read_asserts
from millrace_sandbox.code_tests import is_equal, judge, read_tests
from millrace_sandbox.inside.limits import Limits
from millrace_sandbox.program import CallAnswer, EndOfProgram, ProgramOutcome, parsed
from millrace_sandbox.sandbox import Sandbox

LIMITS = Limits(cpu_s=2, wall_s=60, memory_bytes=256 * 2**20)


def verdict_of(sandbox: Sandbox, code: str, column: Any, **columns: Any) -> Any:
    tests = read_asserts(column, columns) or read_tests(column, None, columns)
    return judge(sandbox, code, tests, LIMITS)


RETURNED = {
    "date": ("datetime.date(2024, 1, 2)", "f() == datetime.date(2024, 1, 2)"),
    "datetime": ("datetime.datetime(2024, 1, 2, 3, 4, 5, 6)", "f().microsecond == 6 and f().year == 2024"),
    "moment": (
        "datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc)",
        "f() == datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc)",
    ),
    "time": ("datetime.time(1, 2)", "f() == datetime.time(1, 2)"),
    "timedelta": ("datetime.timedelta(days=1, hours=1)", "f() == datetime.timedelta(hours=25)"),
    "Counter": ("collections.Counter('aab')", "f()['z'] == 0 and f().most_common(1) == [('a', 2)]"),
    "OrderedDict": ("collections.OrderedDict(a=1, b=2)", "f().popitem(last=False) == ('a', 1)"),
    "defaultdict": ("collections.defaultdict(list, a=[1])", "f() == {'a': [1]} and f()['b'] == []"),
    "defaultdict-of-its-own": ("collections.defaultdict(lambda: 3, a=1)", "f() == {'a': 1}"),
    "namedtuple": ("collections.namedtuple('P', 'x y')(1, [2])", "f() == (1, [2]) and f().y == [2]"),
    "keys": ("{'a': 1, 'b': 2}.keys()", "f() == {'a', 'b'} and list(f()) == ['a', 'b']"),
    "values": ("{'a': 1, 'b': 1}.values()", "list(f()) == [1, 1]"),
    "items": ("{'a': [1]}.items()", "list(f()) == [('a', [1])]"),
    "proxy": ("types.MappingProxyType({'a': 1})", "f() == {'a': 1}"),
    "bytearray": ("bytearray(b'ab')", "f() == bytearray(b'ab')"),
    "memoryview": ("memoryview(b'ab')", "bytes(f()) == b'ab'"),
    "array": ("array.array('i', [1, 2])", "list(f()) == [1, 2]"),
    "path": ("pathlib.Path('a') / 'b'", "f() == pathlib.Path('a/b')"),
    "uuid": ("uuid.UUID(int=7)", "f().int == 7"),
    "slice": ("slice(1, 2)", "f() == slice(1, 2)"),
    "ellipsis": ("...", "f() is ..."),
    "type": ("[int, str]", "f() == [int, str]"),
    "numpy-number": ("numpy.int64(3)", "f() == 3"),
    "numpy-truth": ("numpy.bool_(True)", "f() is True"),
    "numpy-array": ("numpy.array([[1, 2]])", "f() == [[1, 2]]"),
}
MODULES = "array, collections, datetime, pathlib, types, uuid"


@pytest.mark.parametrize("name", RETURNED)
def test_a_test_sees_the_value_that_a_program_returns(bare: Sandbox, name: str) -> None:
    value, claim = RETURNED[name]
    numpy = ", numpy" if "numpy" in value else ""
    code = f"import {MODULES}{numpy}\ndef f(): return {value}"
    assert verdict_of(bare, code, [f"import {MODULES}\nassert {claim}"]).num_passed == 1


def test_an_array_is_one_where_the_tests_have_numpy(bare: Sandbox) -> None:
    code = "import numpy as np\ndef f(x): return x * np.array([1.5, 2])"
    tests = [
        "import numpy as np\nassert f(np.array([2, 2])).dtype == float and f(np.float64(2)).shape == (2,)",
        "assert np.array_equal(f(2), np.array([3, 4]))",
        "assert f(np.array([2, 3])).tolist() == [3, 7]",
    ]
    assert verdict_of(bare, code, tests).num_passed == 2


@pytest.mark.parametrize(
    "value", ["slice", "b'ab'", "{1, 2}", "datetime.date(2024, 1, 1)", "collections.Counter('aa')"]
)
def test_an_argument_is_of_the_type_that_the_test_gives(bare: Sandbox, value: str) -> None:
    modules = "import collections, datetime\n"
    code = f"{modules}def f(x): return type(x).__name__"
    assert verdict_of(bare, code, [f"{modules}assert f({value}) == type({value}).__name__"]).num_passed == 1


CHANGED = {
    "a list": ("xs.sort()", "xs = [3, 1]", "xs == [1, 3]"),
    "a slice": ("xs[:] = xs[1:]", "xs = [1, 2, 3]", "xs == [2, 3]"),
    "a longer list": ("xs.append(xs[0])", "xs = [1]", "xs == [1, 1]"),
    "rows": ("[row.reverse() for row in xs] and None", "row = [1, 2]; xs = [row, [3]]", "row == [2, 1]"),
    "a table": ("xs.pop('a') and xs.update(b=2)", "xs = {'a': 1}", "xs == {'b': 2}"),
    "a table in a table": ("xs['a'].append(1)", "a = []; xs = {'a': a}", "a == [1]"),
    "a set": ("xs.add(1)", "xs = {2}", "xs == {1, 2}"),
    "a deque": ("xs.rotate(1)", "import collections; xs = collections.deque([1, 2])", "list(xs) == [2, 1]"),
    "bytes": ("xs.reverse()", "xs = bytearray(b'ab')", "xs == b'ba'"),
    "a list in a tuple": ("xs[0].append(1)", "a = []; xs = (a, 1)", "a == [1]"),
    "a Counter": ("xs.update('a')", "import collections; xs = collections.Counter('a')", "xs['a'] == 2"),
}


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("call", ["f(xs)", "f(xs=xs)"])
def test_a_test_sees_what_a_function_without_a_result_does_to_its_arguments(
    bare: Sandbox, name: str, call: str
) -> None:
    body, setup, claim = CHANGED[name]
    test = f"{setup}\n{call}\nassert {claim}"
    assert verdict_of(bare, f"def f(xs): {body}", [test], entry_point="f").num_passed == 1
    assert verdict_of(bare, "def f(xs): pass", [test], entry_point="f").num_passed == 0


def test_a_function_with_a_result_changes_nothing_that_a_test_compares_it_with(bare: Sandbox) -> None:
    tests = ["xs = [2, 1]\nassert f(xs) == sorted(xs)"]
    assert verdict_of(bare, "def f(xs):\n    xs.clear()\n    return xs", tests).num_passed == 0


UNIQUE = "def f(xs):\n    xs[:] = sorted({*xs})\n    xs.append(9)\n    return len(xs) - 1"
LOOKED_AT = {
    "the beginning": "xs = [1, 1, 2]\nk = f(xs)\nassert k == 2\nassert xs[:k] == [1, 2]",
    "in one assert": "xs = [1, 1, 2]\nassert f(xs) == 2 and xs[:2] == [1, 2]",
    "in a pair": "xs = [1, 1, 2]\nassert (f(xs), xs[:2]) == (2, [1, 2])",
    "by keyword": "xs = [1, 1, 2]\nk = f(xs=xs)\nassert sorted(xs[:k]) == [1, 2]",
    "one by one": "xs, want = [1, 1, 2], [1, 2]\nk = f(xs)\nassert k == 2\n"
    "for i in range(k):\n    assert xs[i] == want[i]",
    "cases": "for xs, want in [([1, 1], [1]), ([2, 1], [1, 2])]:\n    k = f(xs)\n    assert xs[:k] == want",
    "a copy": "xs = [1, 1, 2]\nwant = sorted(set(xs))\nk = f(xs)\nassert xs[:k] == want",
    "check": "def check(candidate):\n    xs = [1, 1, 2]\n    assert candidate(xs) == 2\n"
    "    assert xs[:2] == [1, 2]",
    "pytest": "from solution import f\ndef test_f():\n    xs = [2, 2, 1]\n    k = f(xs)\n"
    "    assert xs[:k] == [1, 2]",
    "unittest": "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n"
    "        xs = [2, 2, 1]\n        k = f(xs)\n        self.assertEqual(xs[:k], [1, 2])",
}


@pytest.mark.parametrize("name", LOOKED_AT)
def test_a_test_sees_what_a_function_with_a_result_does_to_an_argument(bare: Sandbox, name: str) -> None:
    test = LOOKED_AT[name]
    column: Any = test if name in ("check", "pytest", "unittest") else [test]
    assert verdict_of(bare, UNIQUE, column, entry_point="f").num_passed == 1
    kept = "def f(xs): return len({*xs})"
    assert verdict_of(bare, kept, column, entry_point="f").num_passed == 0


@pytest.mark.parametrize(
    "test",
    [
        "xs = [2, 1]\nassert f(xs) == sorted(xs)\nassert xs != [7]",
        "xs = [2, 1]\nr = f(xs)\nassert r == sorted(xs) and xs != [7]",
        "xs = [2, 1]\nr = f(xs)\nwant = sorted(xs)\nassert r == want\nassert xs != [7]",
        "xs = ys = [2, 1]\nzs = xs\nr = f(xs)\nassert r == zs and xs != [7]",
        "xs = [2, 1]\nr = f(xs)\ndef same(a, b): return a == b\nassert same(r, sorted(xs))\nassert xs != [7]",
    ],
)
def test_no_function_changes_both_sides_of_a_comparison(bare: Sandbox, test: str) -> None:
    empties = "def f(xs):\n    xs.clear()\n    return []"
    assert verdict_of(bare, empties, [test], entry_point="f").num_passed == 0


@pytest.mark.parametrize("left", ["1", "[[1]]", "{}"])
def test_an_answer_with_a_value_has_no_changed_arguments(left: str) -> None:
    with pytest.raises(EndOfProgram, match=r"arguments that were changed"):
        parsed(f'{{"value": 1, "left": {left}}}'.encode())


GIVEN = {
    "a deque": ("return collections.deque([x])", [1]),
    "a generator": ("yield x", [1]),
    "a map": ("return map(str, [x])", ["1"]),
    "a range": ("return range(x)", [0]),
    "keys": ("return {x: 2}.keys()", [1]),
    "a decimal": ("return decimal.Decimal(x) / 2", 0.5),
    "a fraction": ("return [fractions.Fraction(x, 2)]", [0.5]),
    "a whole decimal": ("return decimal.Decimal(10) ** 20", 10**20),
    "a proxy": ("return types.MappingProxyType({'a': x})", {"a": 1}),
    "a number of numpy": ("import numpy; return numpy.int64(x)", 1),
    "an array of numpy": ("import numpy; return numpy.array([x])", [1]),
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_a_function_returns_is_compared_as_json_writes_it(bare: Sandbox, name: str) -> None:
    body, output = GIVEN[name]
    code = f"import collections, decimal, fractions, types\ndef f(x): {body}"
    tests = {"fn_name": "f", "inputs": [[1], [1]], "outputs": [output, output]}
    assert verdict_of(bare, code, tests).outcome is ProgramOutcome.PASSED


def test_a_function_without_a_result_answers_by_its_first_argument(bare: Sandbox) -> None:
    tests = {"fn_name": "order", "inputs": [[[2, 1], 7], [[1, 2], 7]], "outputs": [[1, 2], [1, 2]]}
    code = "class Solution:\n    def order(self, nums, k): nums.sort()"
    assert verdict_of(bare, code, tests).outcome is ProgramOutcome.PASSED
    assert verdict_of(bare, code.replace("nums.sort()", "pass"), tests).num_passed == 1
    finds = "def order(nums, k):\n    nums.sort()\n    return nums.index(k) if k in nums else None"
    assert verdict_of(bare, finds, {**tests, "outputs": [None, None]}).num_passed == 2
    answers = bare.call(code, "order", [[[2, 1], 7]], LIMITS).answers
    assert answers == [CallAnswer(None)] and answers[0].left == [[1, 2]]


WITHOUT_IMPORTS = [
    "def f(x: List[int]) -> Optional[int]: return min(inf, x)",
    "def f(x): return Counter([x]).most_common(1)[0][0]",
    "@cache\ndef f(x): return heapq.nsmallest(1, [x])[0] + bisect_left([], x)",
    "class Solution:\n    @lru_cache(None)\n    def f(self, x): return gcd(x, 0) or math.floor(0.5)",
    "def f(x): return reduce(operator.add, accumulate([x]))",
]


@pytest.mark.parametrize("code", WITHOUT_IMPORTS)
def test_names_that_judges_of_contests_import_are_there(bare: Sandbox, code: str) -> None:
    tests = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [1, 2]}
    assert verdict_of(bare, code, tests).outcome is ProgramOutcome.PASSED


SUMS = "\nfor line in lines: print(sum(map(int, line.split())))"
READS = {
    "the size of the file": "import os\nlines = os.read(0, os.fstat(0).st_size).splitlines()",
    "a file in memory": "import io, os\nlines = io.BytesIO(os.read(0, os.fstat(0).st_size))",
    "a map": "import mmap\nlines = mmap.mmap(0, 0, access=mmap.ACCESS_READ)[:].splitlines()",
    "twice": "import sys\nsys.stdin.read()\nsys.stdin.seek(0)\nlines = sys.stdin.read().splitlines()",
    "by its number": "lines = open(0)",
    "its bytes": "import sys\nlines = sys.stdin.buffer",
    "by both": "import sys\nlines = [input(), sys.stdin.readline()]",
    "the one, then the other": "import sys\nlines = [next(sys.stdin), input()]",
    "with numpy": "import sys\nimport numpy as np\nlines = ['3 0', str(np.loadtxt(sys.stdin, int)[1].sum())]",
}


@pytest.mark.parametrize("name", READS)
def test_the_input_is_a_file_as_judges_of_contests_have_it(bare: Sandbox, name: str) -> None:
    tests = {"inputs": ["1 2\n3 4\n"], "outputs": ["3\n7\n"]}
    verdict = verdict_of(bare, READS[name] + SUMS, tests)
    assert verdict.outcome is ProgramOutcome.PASSED, verdict.output


def test_an_input_that_is_larger_than_a_file_may_be_is_read_too(bare: Sandbox) -> None:
    limits = Limits(cpu_s=2, wall_s=60, disk_bytes=1000)
    assert bare.run("print(len(input()))", b"x" * 2000, limits).stdout == b"2000\n"


def test_a_program_may_recurse_deeply_and_ask_for_a_large_stack(any_level: Sandbox) -> None:
    deep = "import functools\n@functools.cache\ndef g(n): return n and g(n - 1)\nprint(g(20_000))"
    assert any_level.run(deep, b"", LIMITS).stdout == b"0\n"
    asks = "import threading\nthreading.stack_size(2**29)\nprint(threading.stack_size())"
    assert any_level.run(asks, b"", LIMITS).stdout == b"67108864\n"


IN_PYTHON = """
import functools
from millrace_sandbox.inside.zygote import cache_in_python
cache_in_python()
g = functools.cache(lambda n: n and g(n - 1))
assert (g(200), g.cache_info().currsize, type(g)) == (0, 201, type(cache_in_python)), g
"""


def test_a_cache_in_python_caches() -> None:
    subprocess.run([sys.executable, "-c", IN_PYTHON], check=True)


THREAD = "import sys, threading, time\ndef main():\n    time.sleep(0.1)\n    print(int(input()) + 1)\n"
THREADS = {
    "started": "threading.Thread(target=main).start()",
    "and the program raises": "threading.Thread(target=main).start()\nraise ValueError",
    "and the program exits": "threading.Thread(target=main).start()\nsys.exit()",
    "in a pool": "from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor(1).submit(main)",
    "that starts another": "threading.Thread(target=threading.Thread(target=main).start).start()",
}


@pytest.mark.parametrize("name", THREADS)
def test_a_program_ends_when_its_threads_have_ended_as_in_any_python(bare: Sandbox, name: str) -> None:
    assert bare.run(THREAD + THREADS[name], b"1\n", LIMITS).stdout == b"2\n"
    daemon = "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()"
    assert bare.run(f"{daemon}\nprint(1)", b"", LIMITS).stdout == b"1\n"


ALONE = {
    "joined": "thread = threading.Thread(target=main)\nthread.start()\nthread.join()",
    "watched": "t = threading.Thread(target=time.time)\nt.start()\nwhile t.is_alive(): ...\nmain()",
    "a class": "class T(threading.Thread):\n    def run(self): main()\nT().start()",
    "raises": "threading.Thread(target=lambda: (main(), 1 / 0)).start()",
    "exits": "threading.Thread(target=lambda: (main(), sys.exit(1))).start()",
}


@pytest.mark.parametrize("name", ALONE)
def test_a_thread_that_programs_begin_for_its_stack_runs_at_every_level(
    any_level: Sandbox, name: str
) -> None:
    code = THREAD + "threading.stack_size(2**27)\n" + ALONE[name]
    assert any_level.run(code, b"1\n", LIMITS).stdout == b"2\n"


@pytest.mark.parametrize(
    ("column", "columns"),
    [
        ({"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]}, {}),
        ({"fn_name": "add", "inputs": ['"a"\n"b"'], "outputs": ['"ab"']}, {}),
        ({"fn_name": "add", "inputs": ['"a"\n"b"'], "outputs": ["ab"]}, {}),
        ({"test_cases": [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": 3}]}, {}),
        ({"test_cases": [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}]}, {}),
    ],
)
def test_tests_of_a_function_are_read_as_their_data_sets_write_them(
    bare: Sandbox, column: Any, columns: dict[str, Any]
) -> None:
    for right, code in [(True, "def add(a, b): return a + b"), (False, "def add(a, b): return '4'")]:
        assert (verdict_of(bare, code, column, **columns).outcome is ProgramOutcome.PASSED) is right


FOREIGN: list[tuple[str, list[Any], list[Any]]] = [
    ("{3, 1, 2}", [[1, 2, 3], [3, 1, 2], "{1, 2, 3}", "{3, 2, 1}"], [[1, 2], [1, 2, 2], [1, 2, 4], "{1, 2}"]),
    ("frozenset('a')", [["a"], "{'a'}"], [["b"], [], "a"]),
    ("set()", [[], "set()"], [None, [0], "{}"]),
    ("[{1, 2}, {3}]", [[[2, 1], [3]]], [[[3], [1, 2]]]),
    ("{'a': {2, 1}}", [{"a": [1, 2]}], [{"a": [1]}]),
    ("[2, 1]", [[2, 1], "(2, 1)"], [[1, 2], "[2, 1]", "(1, 2)", "{1, 2}"]),
    ("(1, (2, 'a'))", [[1, [2, "a"]], "(1, (2, 'a'))"], ["(1, 2)", [1, 2, "a"]]),
    ("datetime.date(2024, 1, 2)", ["2024-01-02"], ["2024-01-03", "2024-1-2", [2024, 1, 2]]),
    ("datetime.datetime(2024, 1, 2, 3)", ["2024-01-02T03:00:00", "2024-01-02 03:00:00"], ["2024-01-02"]),
    ("datetime.time(1, 2)", ["01:02:00"], ["01:03:00"]),
    ("datetime.timedelta(days=1)", ["1 day, 0:00:00"], [86400, "1 day"]),
    ("b'ab'", ["ab", "b'ab'", [97, 98]], ["abc", [97], "6162"]),
    ("bytearray(b'ab')", ["ab", [97, 98]], ["ba"]),
    ("decimal.Decimal('1.50')", [1.5, "1.50"], [1.6, "1.5", True]),
    ("fractions.Fraction(1, 3)", [1 / 3, "1/3"], ["2/6", 0.3]),
    ("complex(1, 2)", ["(1+2j)"], ["1+3j", [1, 3]]),
    ("uuid.UUID(int=7)", ["00000000-0000-0000-0000-000000000007"], [7]),
    ("pathlib.Path('a') / 'b'", ["a/b"], ["a"]),
    ("{'\\0set': [1, 1]}", [], [[1], [1, 1]]),
    ("{'\\0set': 1}", [], [1, [1]]),
    ("{'\\0bytes': [1]}", [], [[1]]),
    ("{'\\0number': [1, 2, 3]}", [], [1, 2, 3]),
]


@pytest.mark.parametrize(("value", "right", "wrong"), FOREIGN)
def test_what_json_has_not_equals_each_form_that_data_sets_give_it(
    bare: Sandbox, value: str, right: list[Any], wrong: list[Any]
) -> None:
    outputs = [*right, *wrong, {"no": "list of one"}]
    code = f"import datetime, decimal, fractions, pathlib, uuid\ndef f(x): return {value}"
    column = {"fn_name": "f", "inputs": [[1]] * len(outputs), "outputs": outputs}
    answers = bare.call(code, "f", column["inputs"], LIMITS).answers
    passed = [is_equal(answer.value, each) for answer, each in zip(answers, outputs, strict=True)]
    assert passed == [True] * len(right) + [False] * (len(wrong) + 1)
    assert verdict_of(bare, code, column).num_passed == len(right)


OWN = """
import dataclasses, enum
class P:
    def __init__(self, x): self.x, self.is_right = x, object
    def __eq__(self, other): return True
    def __bool__(self): return True
class Node:
    __slots__ = ("val", "next")
    def __init__(self, val, next=None): self.val, self.next = val, next
@dataclasses.dataclass
class D:
    x: int
class E(enum.Enum):
    A = 1
def f(x): return {"p": [P(1)], "node": Node(1, Node(2)), "d": (D(3), D(3), D(4)), "e": E.A}[x]
"""


@pytest.mark.parametrize(
    ("claim", "is_right"),
    [
        ("f('p')[0].x == 1", True),
        ("f('p') == f('p')", True),
        ("type(f('p')[0]).__name__ == 'P'", True),
        ("f('node').next.val == 2 and f('node').next.next is None", True),
        ("f('d')[0] == f('d')[1] and f('d')[0] != f('d')[2]", True),
        ("f('e').name == 'A' and f('e').value == 1", True),
        ("f('p')[0] == 1", False),
        ("f('p') == [1]", False),
        ("f('p')[0].x == 2", False),
        ("f('p')[0].y == 1", False),
        ("f('p')[0].is_right()", False),
    ],
)
def test_an_object_of_the_programs_own_class_is_what_its_attributes_are(
    bare: Sandbox, claim: str, is_right: bool
) -> None:
    assert verdict_of(bare, OWN, [f"assert {claim}"], entry_point="f").num_passed == is_right


def test_a_test_may_make_an_object_of_a_class_of_the_program(bare: Sandbox) -> None:
    assert verdict_of(bare, OWN, ["assert f('p') == [P(1)]"], entry_point="f").num_passed == 1
    assert verdict_of(bare, OWN, ["assert f('d')[2] == D(3)"], entry_point="f").num_passed == 0


MANY = 300_000


@pytest.mark.parametrize(
    ("right", "tests"),
    [
        (
            "print(*range(int(input())))",
            {"inputs": [f"{MANY}\n"], "outputs": [" ".join(map(str, range(MANY)))]},
        ),
        ("def f(n): return [*range(n)]", {"fn_name": "f", "inputs": [[MANY]], "outputs": [[*range(MANY)]]}),
        ("def f(x): return x[::-1]", [f"x = [*range({MANY})]\nassert f(x) == x[::-1]"]),
    ],
)
def test_a_program_may_give_as_much_as_is_expected(bare: Sandbox, right: str, tests: Any) -> None:
    assert verdict_of(bare, right, tests).outcome is ProgramOutcome.PASSED
    assert verdict_of(bare, f"{right}[1:]" if "def" in right else f"{right}, print(1)", tests).num_passed == 0


@pytest.mark.parametrize(
    "column",
    [
        [{"input": {"stdin": "1\n"}, "output": {"stdout": "2\n"}}],
        {"inputs": [{"stdin": "1\n"}], "outputs": [{"stdout": "2\n"}]},
    ],
)
def test_texts_of_sandbox_fusion(bare: Sandbox, column: Any) -> None:
    assert verdict_of(bare, "print(int(input()) + 1)", column).outcome is ProgramOutcome.PASSED
    assert verdict_of(bare, "print(int(input()))", column).num_passed == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("generated_checker", "import sys"),
        ("input_mode", "file"),
        ("input_file", "in.txt"),
        ("FAIL_TO_PASS", "[]"),
    ],
)
def test_a_row_with_a_checker_or_files_of_its_own_is_a_failure(name: str, value: str) -> None:
    column = [{"input": "1\n", "output": "2\n"}]
    with pytest.raises(DataError, match=f"'{name}'.*Leave such rows out"):
        read_tests(column, None, {name: value})
    assert read_tests(column, None, {name: None, "input_mode": "stdio"}).outputs == ["2\n"]


GEEKS = (
    "#User function Template for python3\n\nclass Solution:\n    def least(self, arr, n):\n        #code here"
)


@pytest.mark.parametrize("begun", [GEEKS, "def least(arr):\n    pass\n", "\nclass Solution {\n"])
def test_tests_of_a_function_that_nothing_names_are_a_failure(begun: str) -> None:
    """As those of GeeksforGeeks in TACO. A right program has a function alone, and would earn 0."""
    column = json.dumps({"inputs": ["n = 2\narr[] = {3, 1}"], "outputs": ["1"]})
    with pytest.raises(DataError, match="`starter_code` begins a function"):
        read_tests(column, None, {"starter_code": begun})
    reads = f"{begun}\nif __name__ == '__main__':\n    n = int(input())"
    for other in ("", None, "# def least\n", "import sys\n", reads):
        assert read_tests(column, None, {"starter_code": other}).outputs == ["1"]
    named = json.dumps({"fn_name": "least", "inputs": [[[3, 1]]], "outputs": [1]})
    assert read_tests(named, None, {"starter_code": begun}).function == "least"


OWN_TESTS = """
import pytest
from pytest import approx, fixture, raises
@pytest.fixture
def one(): return 1
@fixture(scope="module")
def two(): return 2
@pytest.mark.parametrize("x, y", [(1, 2), pytest.param(2, 3, id="a")])
@pytest.mark.skip
def test_f(x, y): assert f(x) == approx(y)
class TestF:
    @pytest.mark.parametrize("x", [None])
    def test_none(self, x):
        with raises(TypeError): f(x)
if __name__ == "__main__":
    pytest.main([__file__])
"""


def test_a_program_may_have_tests_of_pytest_behind_it(bare: Sandbox) -> None:
    """As those that models wrote for AceCode. pytest need not be installed, and no test is run."""
    tests = {"fn_name": "f", "inputs": [[1], [5]], "outputs": [2, 6]}
    asserts = read_asserts(["import pytest\nwith pytest.raises(TypeError): f(None)", "assert f(1) == 2"], {})
    assert asserts is not None
    for code, right in (("def f(x): return x + 1", True), ("def f(x): return x", False)):
        for own in (OWN_TESTS, f"\n{OWN_TESTS.split('if __name__')[0]}"):
            for each in (read_tests(tests), asserts):
                passed = judge(bare, code + own, each, LIMITS).outcome is ProgramOutcome.PASSED
                assert passed is right
