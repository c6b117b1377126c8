"""The tests' own process: it runs asserts, and asks through its descriptors for each call of the program.

It is confined as a program is, and is another process than the program. The program's values come as data
(inside/values.py). A message names a test; the answer is `["call", ...]`, and then the next message has what
the call gave; or it is how the test ended: `["passed"]`, `["failed", why]` or `["refused", why]`. An error of
the test's own code is `["raised", why, [type, line], name]`: `name` is what it could not find. One of the
stand-ins' code is `["broken", why]`.
"""

from __future__ import annotations

import ast
import builtins
import cmath
import gc
import json
import os
import random
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import eq, gt
from types import ModuleType, SimpleNamespace
from typing import Any

from millrace_sandbox.inside import guest, objects, values
from millrace_sandbox.inside.objects import NotAsked, stand_ins
from millrace_sandbox.inside.values import LONG, SEEDED, Here, decode, encode, write_back

FILE = "tests"
OWN = (objects.__file__, values.__file__)
CALLS_MAX = 10_000  # more calls of a stand-in are a loop that waits for an answer
HELD_MAX = 10  # so many lists, tables and sets of the program are the same here and there, the last ones
_held: dict[int, tuple[Any, Any]] = {}  # these by number, and what is known of them there
_of_program: list[BaseException] = []  # the exceptions that the program raised, and not a test
_caught: dict[str, type[Exception]] = {}  # what stands for the program's classes of exceptions
_seeds: dict[str, Any] = {}  # the states of the generators whose seeds tests have set since the last call
KNOWN = {*sys.stdlib_module_names, "numpy"} - {"unittest"}
"""The modules whose exceptions a program may raise here. Those of the framework of tests would end a test."""


class CannotBeAsked(BaseException):
    """The test wants what no message can say. No `except` of a test catches this by mistake."""


class NoEnd(BaseException):
    """A test goes on asking a stand-in."""


MEANT = (NotAsked, CannotBeAsked, RecursionError, MemoryError)  # what stand-ins raise by no fault of theirs


def run(program: dict[str, Any]) -> None:
    """Run `program["code"]`, where each of `program["names"]` stands for one of the program, and then each
    test that is asked for. Or say whether the tests `program["instead"]` raise in any case."""
    names, code = program["names"], program["code"]
    Here.given = frozenset(program["shared"])
    if program["by_steps"]:
        Here.items = 0
        gc.disable()  # what it would close is asked for in the middle of a question
    for name in program["caught"]:
        _new(name)
    if "instead" in program:
        tests, error = program["instead"], program["error"]
        same = all(raised(code, tests, names, value) == error for value in INSTEAD)
        exchange(["same"] if same else ["other"])
    named = stand_ins(called, names)
    module = begun(named)
    while True:
        code = exchange(ended(code, module, named))


def begun(named: dict[str, Any]) -> ModuleType:
    module = guest.begun(FILE)
    Here.names = module.__dict__
    random.seed = seeding("random", random.seed, random.getstate)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed = seeding("numpy", numpy.random.seed, numpy.random.get_state)
    pytest: Any = ModuleType("pytest")  # what most tests use of it, which need not be installed
    pytest.raises, pytest.approx, pytest.mark = raises, Approx, SimpleNamespace(parametrize=parametrize)
    sys.modules["pytest"] = pytest
    module.__dict__.update({**named, **_caught})
    return module


def seeding(name: str, seed: Any, state: Any) -> Any:
    """`seed` of a generator of random numbers. The program draws from the same state at its next call."""

    def noted(*args: Any, **keywords: Any) -> None:
        seed(*args, **keywords)
        _seeds[name] = state

    return noted


def exchange(message: list[Any]) -> Any:
    """Send a message, and wait for the next one. The process ends when there is none."""
    guest.answer(os.write, json.dumps({"value": message}).encode())
    return guest.receive(guest.CALLS)


def ended(code: str, module: ModuleType, named: dict[str, Any]) -> list[Any]:
    try:
        exec(compile(code, FILE, "exec"), module.__dict__)
    except CannotBeAsked as error:
        return ["refused", str(error)]
    except BaseException as error:
        line, where = place(error)
        if where:
            return ["broken", f"{guest.text_of(error)} ({where})"]
        if isinstance(error, AssertionError) or is_of_program(error):
            return ["failed", guest.text_of(error)]
        name = getattr(error, "name", None) if isinstance(error, NameError) else None
        return ["raised", guest.text_of(error), [type(error).__name__, line], name]
    changed = [name for name, stand_in in named.items() if module.__dict__.get(name) is not stand_in]
    return ["refused", f"they define {changed[0]} themselves"] if changed else ["passed"]


def raises(kind: Any, *call: Any, match: str | None = None, **keywords: Any) -> Any:
    """`pytest.raises`: the block, or the call of the other arguments, must raise such an exception."""
    if not call:
        return _raises(kind, match or "")
    with _raises(kind, "") as info:
        call[0](*call[1:], **keywords)
    return info


@contextmanager
def _raises(kind: Any, match: str) -> Iterator[SimpleNamespace]:
    info = SimpleNamespace(value=None)
    try:
        yield info
    except kind as error:
        info.value, info.type = error, type(error)
        assert re.search(match, str(error)), f"{match!r} is not in {error}"
    else:
        raise AssertionError(f"{kind} was not raised")


class Approx:
    """`pytest.approx`: a number that is near, or a list, an array or a table of such numbers."""

    __array_ufunc__ = None

    def __init__(self, expected: Any, rel: Any = None, abs: Any = None, nan_ok: bool = False) -> None:
        self.expected, self.abs, self.nan_ok = expected, 1e-12 if abs is None else abs, nan_ok
        self.rel = (1e-6 if abs is None else 0.0) if rel is None else rel

    def __eq__(self, value: Any) -> bool:
        one, other = [x.tolist() if type(x).__module__ == "numpy" else x for x in (value, self.expected)]
        try:
            if isinstance(other, dict):
                return one.keys() == other.keys() and all(self._like(other[key]) == one[key] for key in one)
            if isinstance(other, list | tuple):
                return len(one) == len(other) and all(map(eq, map(self._like, other), one))
            if self.nan_ok and other != other:
                return bool(one != one)
            return bool(one == other) or cmath.isclose(one, other, rel_tol=self.rel, abs_tol=self.abs)
        except (TypeError, AttributeError, OverflowError):
            return False

    def _like(self, expected: Any) -> Approx:
        return Approx(expected, self.rel, self.abs, self.nan_ok)


def parametrize(names: str | Sequence[str], rows: Any) -> Any:
    """`pytest.mark.parametrize`: a call for each row."""
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else names

    def decorated(test: Any) -> Any:
        def each(*args: Any, **keywords: Any) -> None:
            for row in rows:
                test(*args, **keywords, **dict(zip(keys, row if len(keys) > 1 else [row], strict=True)))

        return each

    return decorated


def place(error: BaseException) -> tuple[int, str]:
    """The line of the tests that raised an error; 0: none did. And the line of the stand-ins that did by a
    fault of theirs; empty: none. How deep a value may be, and how large, is a matter of who gives it.
    """
    line, where, trace = 0, "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file == FILE:
            line, where = trace.tb_lineno, ""
        elif file in OWN:
            where = f"{os.path.basename(file)}, line {trace.tb_lineno}"
        trace = trace.tb_next
    is_meant = isinstance(error, MEANT) or any(error is one for one in _of_program)
    return line, "" if is_meant else where


def is_of_program(error: BaseException | None) -> bool:
    """Whether the program raised an error, or one that the test met before this one."""
    while error is not None:
        if any(error is one for one in _of_program):
            return True
        error = error.__cause__ or error.__context__
    return False


def called(owner: int | str, what: str | None, /, *args: Any, **keywords: Any) -> Any:
    """Ask the program (see `guest.called_plainly`). Its exception is raised here (see `exception_of`)."""
    while _seeds:
        name, state = _seeds.popitem()
        called(owner, SEEDED, name, state())
    answer = exchange(["call", owner, what, *encoded(args, keywords)])
    try:
        left, named = answer.get("left") or answer.get("changed") or ([], {})
        left, named = [*map(decode, left)], {name: decode(each) for name, each in named.items()}
        error = exception_of(*answer["raised"]) if "error" in answer else None
        value, number = decode(answer.get("value")), answer.get("number")
        known, given = _held.get(number), dict(zip(answer.get("given", ()), args, strict=False))
        news = [(each, _held[each][0], decode(content)) for each, content in answer.get("held", ())]
    except MemoryError:
        raise
    except Exception as forged:  # who answers so is no right program
        error, news = forged, []
    for each, one, content in news:
        _held[each] = (one, encode(write_back(one, content)))
    if error is not None:
        _of_program.append(error)
        raise error
    write_back([[*args], keywords], [left, named])
    value = value if known is None else write_back(known[0], value)
    for each, one in {**given, number: value}.items():
        if each is not None and type(one) in guest.CHANGING:
            _held[each] = (one, encode(one))
    return value


def changed() -> list[Any]:
    """The numbers of what a test still has, and the content of what it has changed. Raises: TypeError."""
    counts = {number: references(value) for number, (value, _) in [*_held.items(), (None, ([[]], None))]}
    held = [number for number, count in counts.items() if any(map(gt, count, counts[None]))][-HELD_MAX:]
    now = {n: known if len(value) > LONG else encode(value) for n, (value, known) in _held.items()}
    told: list[Any] = [
        [n, None if same else now[n]] for n in now if not (same := now[n] == _held[n][1]) or n in held
    ]
    kept = {number: (_held[number][0], now[number]) for number, _ in told}
    _held.clear()
    _held.update(kept)
    return told


def references(value: Any) -> tuple[int, int]:
    """How often something has a list, and the most that something has a list in it."""
    inside = value.values() if isinstance(value, dict) else value
    lists = [each for each in inside if type(each) in (list, dict)]
    return sys.getrefcount(value), max((max(references(each)) for each in lists), default=0)


def encoded(args: Sequence[Any], keywords: dict[str, Any]) -> list[Any]:
    """Raises: CannotBeAsked: an argument is no plain value, or what the test puts into a list."""
    try:
        return [[*map(encode, args)], {name: encode(each) for name, each in keywords.items()}, changed()]
    except TypeError as error:
        raise CannotBeAsked(f"what it passes to the program: {error}") from None


def exception_of(names: list[str], text: str, args: Any, attributes: Any, before: Any) -> BaseException:
    """The exception of the program: of the classes of these names, with its cause and its context."""
    kinds = [_kind_of(*name.rpartition(".")[::2]) for name in names]
    kind = kinds[0]
    if kind.__module__ == __name__:
        lowest = [one for one in kinds if [*filter(one.__subclasscheck__, kinds)] == [one]]
        kind = type(kind.__name__, tuple(lowest), {"__str__": lambda _: text})
    try:
        error: BaseException = kind(*decode(args))
    except TypeError:  # of a class that is made of other things than its arguments, as JSONDecodeError
        error = kind.__new__(kind, *decode(args))
    vars(error).update({name: each for name, each in decode(attributes).items() if name not in dir(error)})
    cause, context, error.__suppress_context__ = before
    error.__context__ = exception_of(*context) if context else None
    if cause:
        error.__cause__ = exception_of(*cause)
    return error


def _kind_of(module: str, name: str) -> Any:
    """The class of exceptions of Python or numpy with that name; what stands for one of the program."""
    home = sys.modules.get(module) if module.partition(".")[0] in KNOWN else None
    for kind in (getattr(home, "__dict__", {}).get(name), _caught.get(name), vars(builtins).get(name)):
        if isinstance(kind, type) and issubclass(kind, BaseException):
            return kind
    return _new(name)


def _new(name: str) -> type[Exception]:
    """What stands for a class of exceptions of the program."""
    return _caught.setdefault(name, type(name, (Exception,), {}))


# ---------------------------------------------------------------- values in place of the program's


class Anything:
    """A value that takes every operation."""

    def __getattr__(self, *_: Any, **__: Any) -> Any:
        return self

    def __iter__(self) -> Any:
        return iter([self])

    def __float__(self) -> float:
        return 1.0

    def __await__(self) -> Any:
        return self
        yield

    def send(self, _: Any) -> Any:
        raise StopIteration(self)

    throw = close = __getattr__


_ANSWERS = {
    **dict.fromkeys(("bool", *objects.COMPARED), True),
    **dict.fromkeys(("hash", "len", "int", "index"), 1),
}
for _name in (
    *objects.OPERATORS,
    "neg",
    "pos",
    "invert",
    "abs",
    "round",
    "getitem",
    "setitem",
    "delitem",
    "call",
):
    for _each in (_name.strip("_"), f"r{_name.strip('_')}"):
        setattr(Anything, f"__{_each}__", Anything.__getattr__)
for _name, _one in _ANSWERS.items():
    setattr(Anything, f"__{_name}__", lambda *_, _one=_one: _one)


INSTEAD = (1, "a", ["a"], [1], [[1]], {"a": 1}, (1, 1), Anything())
"""What stands for the answers of a program. An error that they all meet does not come from an answer."""


class _WithoutAsserts(ast.NodeTransformer):
    """What is asserted is computed, so that the test goes on."""

    def visit_Assert(self, node: ast.Assert) -> ast.Expr:
        return ast.copy_location(ast.Expr(node.test), node)


def raised(setup: str, tests: list[str], names: dict[str, Any], value: Any) -> list[Any] | None:
    """How the last of the tests raises if each answer is `value` (see `place`); None: it does not."""
    calls = iter(range(CALLS_MAX))

    class StandIn(Anything):
        def __call__(self, *args: Any, **keywords: Any) -> Any:
            if next(calls, None) is None:
                raise NoEnd
            with suppress(CannotBeAsked):  # an argument too deep to be sent is the test's
                encoded(args, keywords)
            return value

    module, error = begun(dict.fromkeys(names, StandIn())), None
    for code in (setup, *tests):
        try:
            tree = _WithoutAsserts().visit(ast.parse(code))
            exec(compile(ast.fix_missing_locations(tree), FILE, "exec"), module.__dict__)
            error = None
        except BaseException as raised:
            error = [type(raised).__name__, place(raised)[0]]
    return error
