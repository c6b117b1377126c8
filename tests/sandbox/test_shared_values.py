"""What tests of BigCodeBench share with a program beside arguments: seeds, streams, exceptions of Python."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.core.errors import DataError
from millrace_sandbox.code_asserts import read_asserts
from millrace_sandbox.code_tests import judge
from millrace_sandbox.inside.limits import Limits
from millrace_sandbox.sandbox import Sandbox

LIMITS = Limits(cpu_s=2, wall_s=30, memory_bytes=256 * 2**20)


def verdict_of(sandbox: Sandbox, code: str, column: Any, **columns: Any) -> Any:
    tests = read_asserts(column, columns, prompt=columns.get("prompt", ""))
    assert tests is not None
    return judge(sandbox, code, tests, LIMITS, given=tests.given)


DRAWS = """
import random
import random as r
from random import shuffle
early = random.random()
def draw(n): return [random.randint(0, 9) for _ in range(n)]
class Deck:
    def __init__(self): self.cards = [*range(9)]
    def mixed(self): shuffle(self.cards); return self.cards
def draw_more(n):
    import numpy
    return numpy.random.randint(0, 9, n).tolist()
"""
OTHER_DRAWS = (
    DRAWS.replace("import random\n", "import random\n", 1)
    .replace("(0, 9", "(1, 9")
    .replace("shuffle(self.cards);", "")
)
SEEDED = {
    "a value": "import random\nrandom.seed(42)\nassert draw(4) == [1, 0, 4, 3]",
    "the name alone": "from random import seed\nseed(42)\nassert draw(4) == [1, 0, 4, 3]",
    "as the test draws": "import random\nrandom.seed(7)\nwant = [random.randint(0, 9) for _ in range(9)]\n"
    "random.seed(7)\nassert draw(9) == want",
    "twice the same": "import random\nrandom.seed(42)\none = draw(9)\nrandom.seed(42)\n"
    "assert one == draw(9) and one == [1, 0, 4, 3, 3, 2, 1, 8, 1]",
    "a seed and a draw": "import random\nrandom.seed(42)\nrandom.random()\nassert draw(2) == [0, 4]",
    "on and on": "import random\nrandom.seed(42)\nassert draw(2) + draw(2) == [1, 0, 4, 3]",
    "a method": "import random\nd = Deck()\nrandom.seed(3)\nassert d.mixed() == [1, 5, 6, 0, 8, 4, 7, 2, 3]",
    "numpy": "import numpy as np\nnp.random.seed(0)\nassert draw_more(4) == [5, 0, 3, 3]",
}


@pytest.mark.parametrize("name", SEEDED, ids=[name.replace(" ", "-") for name in SEEDED])
def test_a_seed_of_the_tests_is_the_programs_seed(bare: Sandbox, name: str) -> None:
    entry = "draw_more" if name == "numpy" else "draw"
    scope: dict[str, Any] = {}
    exec(DRAWS, scope)
    exec(SEEDED[name], scope)
    verdict = verdict_of(bare, DRAWS, SEEDED[name], entry_point=entry, prompt="a class Deck")
    assert verdict.num_passed == 1, verdict.reason
    assert verdict_of(bare, OTHER_DRAWS, SEEDED[name], entry_point=entry).num_passed == 0


RAISING = """
import binascii, configparser, csv, decimal, json, queue, struct, subprocess, zlib
from xml.etree import ElementTree
class Bad(json.JSONDecodeError): pass
KINDS = {
    "json": lambda: json.loads("{"),
    "binascii": lambda: binascii.a2b_base64(b"a"),
    "struct": lambda: struct.unpack("i", b""),
    "zlib": lambda: zlib.decompress(b""),
    "csv": lambda: csv.reader([], "none"),
    "decimal": lambda: decimal.Decimal("a"),
    "xml": lambda: ElementTree.fromstring("<"),
    "queue": lambda: queue.Queue().get_nowait(),
    "option": lambda: configparser.ConfigParser().get("a", "b"),
}
def f(name):
    if name == "own":
        raise Bad("no", "doc", 2)
    if name == "numpy":
        import numpy
        return numpy.linalg.inv(numpy.zeros((2, 2))).tolist()
    if name == "called":
        raise subprocess.CalledProcessError(3, "ls")
    return KINDS[name]()
"""
CAUGHT = {
    "json": "import json\nwith raises(json.JSONDecodeError) as e: f('json')\n"
    "assert e.value.pos == 1 and 'property' in str(e.value)",
    "json.decoder": "import json\nwith raises(json.decoder.JSONDecodeError): f('json')",
    "its base": "import json\nwith raises(ValueError): f('json')",
    "binascii": "import binascii\nwith raises(binascii.Error): f('binascii')",
    "struct": "import struct\nwith raises(struct.error): f('struct')",
    "zlib": "import zlib\nwith raises(zlib.error): f('zlib')",
    "csv": "import csv\nwith raises(csv.Error): f('csv')",
    "decimal": "from decimal import InvalidOperation\nwith raises(InvalidOperation): f('decimal')",
    "xml": "from xml.etree.ElementTree import ParseError\nwith raises(ParseError): f('xml')",
    "queue": "import queue\nwith raises(queue.Empty): f('queue')",
    "option": "import configparser\nwith raises(configparser.NoSectionError) as e: f('option')\n"
    "assert e.value.section == 'a'",
    "own": "import json\nwith raises(json.JSONDecodeError) as e: f('own')\nassert e.value.doc == 'doc'",
    "called": "import subprocess\nwith raises(subprocess.CalledProcessError) as e: f('called')\n"
    "assert e.value.returncode == 3",
    "numpy": "import numpy\nwith raises(numpy.linalg.LinAlgError): f('numpy')",
}


@pytest.mark.parametrize("name", CAUGHT)
def test_an_exception_of_python_is_one_in_the_tests_too(bare: Sandbox, name: str) -> None:
    test = f"from pytest import raises\n{CAUGHT[name]}"
    verdict = verdict_of(bare, RAISING, test, entry_point="f")
    assert verdict.num_passed == 1, verdict.reason
    for wrong in ("raise KeyError('a')", "class Error(Exception): pass\n    raise Error", "pass"):
        assert verdict_of(bare, f"def f(name):\n    {wrong}", test, entry_point="f").num_passed == 0


@pytest.mark.parametrize("kind", ["unittest.SkipTest", "unittest.case._ShouldStop", "tests.CannotBeAsked"])
def test_no_program_ends_a_test_by_an_exception_of_its_framework(bare: Sandbox, kind: str) -> None:
    home, _, name = kind.rpartition(".")
    wrong = f"class E(Exception): pass\nE.__module__, E.__name__ = {home!r}, {name!r}\ndef f(x): raise E"
    test = (
        "import unittest\nclass T(unittest.TestCase):\n    def test_one(self):\n"
        "        with self.subTest(1):\n            self.assertEqual(f(1), 2)\n"
    )
    assert verdict_of(bare, wrong, test).num_passed == 0


STREAMS = """
import io, json
from array import array
def load(f): return json.load(f)
def lines(f): return [line.strip() for line in f]
def rest(f): f.readline(); return f.read()
def write(f, text): f.write(text)
def made(text): return io.StringIO(text)
def numbers(kind): return array(kind, [1, 2])
def kind_of(x): return type(x).__name__
"""
STREAMED = {
    "bytes": ("load", "from io import BytesIO\nassert load(BytesIO(b'[1]')) == [1]"),
    "text": ("load", "from io import StringIO\nassert load(StringIO('[1]')) == [1]"),
    "lines": ("lines", "import io\nassert lines(io.StringIO('a\\nb\\n')) == ['a', 'b']"),
    "its place": ("rest", "import io\nf = io.StringIO('a\\nb\\nc')\nf.readline()\nassert rest(f) == 'c'"),
    "written": ("write", "import io\nf = io.StringIO()\nwrite(f, 'ab')\nassert f.getvalue() == 'ab'"),
    "written bytes": ("write", "import io\nf = io.BytesIO()\nwrite(f, b'ab')\nassert f.getvalue() == b'ab'"),
    "written behind": (
        "write",
        "import io\nf = io.StringIO()\nf.write('a')\nwrite(f, 'b')\nassert f.getvalue() == 'ab'",
    ),
    "given": ("made", "assert made('ab').read() == 'ab' and made('a').getvalue() == 'a'"),
    "array": (
        "numbers",
        "from array import array\nassert isinstance(numbers('i'), array) and numbers('d').typecode == 'd'\n"
        "assert numbers('i') == array('i', [1, 2]) and list(numbers('d')) == [1.0, 2.0]",
    ),
    "an array": ("kind_of", "from array import array\nassert kind_of(array('d', [1])) == 'array'"),
}


@pytest.mark.parametrize("name", STREAMED, ids=[name.replace(" ", "-") for name in STREAMED])
def test_streams_and_arrays_are_what_they_are(bare: Sandbox, name: str) -> None:
    function, test = STREAMED[name]
    verdict = verdict_of(bare, STREAMS, test, entry_point=function)
    assert verdict.num_passed == 1, verdict.reason
    wrong = f"def {function}(*_): return 'x'"
    assert verdict_of(bare, wrong, test, entry_point=function).num_passed == 0


def test_a_stream_that_a_program_closes_is_no_error_of_its_call(bare: Sandbox) -> None:
    code = "def f(x):\n    x.close()"
    assert verdict_of(bare, code, "import io\nassert f(io.StringIO('a')) is None").num_passed == 1


def test_code_that_the_prompt_gives_to_the_tests_may_import_numpy(bare: Sandbox) -> None:
    prompt = 'import numpy as np\ndef f(n):\n    """Zeros."""\n'
    test = "import unittest\nclass T(unittest.TestCase):\n    def test_one(self):\n"
    test += "        self.assertTrue((f(2) == np.zeros(2)).all())"
    code = "import numpy as np\ndef f(n):\n    return np.zeros(n)"
    verdict = verdict_of(bare, code, test, prompt=prompt, entry_point="f")
    assert verdict.num_passed == 1, verdict.reason


FILES = [
    "from tempfile import TemporaryDirectory as T\nd = T()\nassert f(d.name) == {}",
    "from shutil import rmtree\nassert f(1) == 1\nrmtree('a')",
    "from zipfile import ZipFile\nassert f(ZipFile('a')) == 1",
    "from pathlib import Path\nPath('a').write_text('b')\nassert f('a') == 'b'",
    "import os\nf('a')\nassert os.path.exists('a')",
    "import os\nf('a')\nassert 'a' in os.listdir('.')",
    "import os\nos.environ['A'] = '1'\nassert f('A') == '1'",
]


@pytest.mark.parametrize("test", FILES)
def test_tests_of_files_are_refused_by_each_name(test: str) -> None:
    with pytest.raises(DataError, match="no files, no output and no patches"):
        read_asserts(test, {"entry_point": "f"})


def test_what_a_test_may_import_is_said_where_it_imports_more(bare: Sandbox) -> None:
    with pytest.raises(DataError, match=r"No module named 'absent'.*standard library and numpy"):
        verdict_of(bare, "def f(x): return x", "import absent\nassert f(1) == 1")


ASYNC = """
import asyncio
async def add(x):
    await asyncio.sleep(0)
    if x < 0:
        raise ValueError("below")
    return [x + 1]
def later(x): return add(x)
class Adder:
    async def add(self, x): return await add(x)
"""
AWAITED = {
    "a run": "import asyncio\nassert asyncio.run(add(1)) == [2]",
    "several": "import asyncio\nasync def each():\n    return await asyncio.gather(add(1), add(2))\n"
    "assert asyncio.run(each()) == [[2], [3]]",
    "its own": "import asyncio\nasync def case():\n    assert await add(1) == [2]\nasyncio.run(case())",
    "an error": "import asyncio\nimport pytest\nassert asyncio.run(add(1)) == [2]\n"
    "with pytest.raises(ValueError): asyncio.run(add(-1))",
    "given by another": "import asyncio\nassert asyncio.run(later(1)) == [2]",
    "a method": "import asyncio\nassert asyncio.run(Adder().add(1)) == [2]",
}


@pytest.mark.parametrize("name", AWAITED, ids=[name.replace(" ", "-") for name in AWAITED])
def test_a_coroutine_of_the_program_can_be_awaited(bare: Sandbox, name: str) -> None:
    entry = "later" if "later" in AWAITED[name] else "add"
    verdict = verdict_of(bare, ASYNC, AWAITED[name], entry_point=entry)
    assert verdict.num_passed == 1, verdict.reason
    for wrong in (ASYNC.replace("x + 1", "x"), "def add(x): return [2]\ndef later(x): return [2]"):
        assert verdict_of(bare, wrong, AWAITED[name], entry_point=entry).num_passed == 0


VALUES = [
    "from solution import f, LIMIT\nassert f(9) == LIMIT",
    "from solution import f, TABLE\nassert f(TABLE['a']) == 1",
    "import solution\nassert solution.f(9) == solution.LIMIT",
]


@pytest.mark.parametrize("test", VALUES)
def test_tests_of_a_value_of_the_program_are_refused(test: str) -> None:
    with pytest.raises(DataError, match="of the program, and its functions alone can be asked"):
        read_asserts(test, {})


def test_names_of_capitals_may_be_of_functions_and_classes() -> None:
    test = "from solution import GCD, LRU, K, UNUSED\nassert LRU(2).get(1) == GCD(2, 4)\nsorted([1], key=K)"
    found = read_asserts(test, {})
    assert found is not None and found.names[:2] == ["GCD", "LRU"]
