"""The tests' own process: it runs asserts, and asks through its descriptors for each call of the program.

It is confined as a program is, and is another process than the program. The program's values come as data
(inside/values.py). A message names a test; the answer is `["call", ...]`, and then the next message has what
the call gave; or it is how the test ended: `["passed"]`, `["failed", why]` or `["refused", why]`. An error of
the test's own code is `["raised", why, [type, line], name]`: `name` is what it could not find.
"""

from __future__ import annotations

import ast
import builtins
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import eq
from types import ModuleType, SimpleNamespace
from typing import Any

from millrace_sandbox.inside import guest
from millrace_sandbox.inside.objects import changed_attributes, stand_ins
from millrace_sandbox.inside.values import Here, decode, encode, write_back

FILE = "tests"
CALLS_MAX = 10_000
"""More calls of a stand-in are a loop that waits for an answer."""
_of_program: list[BaseException] = []
"""The exceptions that the program raised, and not a test."""
_caught: dict[str, type[Exception]] = {}
"""What stands for the program's classes of exceptions, by name."""


class CannotBeAsked(BaseException):
    """The test wants what no message can say. No `except` of a test catches this by mistake."""


class NoEnd(BaseException):
    """A test goes on asking a stand-in."""


def run(program: dict[str, Any]) -> None:
    """Run `program["code"]`, where each of `program["names"]` stands for one of the program, and then each
    test that is asked for. Or say whether the tests `program["instead"]` raise in any case."""
    names, code = program["names"], program["code"]
    Here.given = frozenset(program["shared"])
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
    pytest: Any = ModuleType("pytest")  # what most tests use of it, which need not be installed
    pytest.raises, pytest.approx, pytest.mark = raises, Approx, SimpleNamespace(parametrize=parametrize)
    sys.modules["pytest"] = pytest
    module.__dict__.update({**named, **_caught})
    return module


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
        if isinstance(error, AssertionError) or is_of_program(error):
            return ["failed", guest.text_of(error)]
        name = getattr(error, "name", None) if isinstance(error, NameError) else None
        return ["raised", guest.text_of(error), place(error), name]
    changed = [name for name, stand_in in named.items() if module.__dict__.get(name) is not stand_in]
    return ["refused", f"they define {changed[0]} themselves"] if changed else ["passed"]


@contextmanager
def raises(kind: Any, match: str = "") -> Iterator[SimpleNamespace]:
    """`pytest.raises`: the block must raise such an exception."""
    info = SimpleNamespace(value=None)
    try:
        yield info
    except kind as error:
        info.value, info.type = error, type(error)
        assert re.search(match, str(error)), f"{match!r} is not in {error}"
    else:
        raise AssertionError(f"{kind} was not raised")


class Approx:
    """`pytest.approx`: a number that is near, or a list or a table of such numbers."""

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None) -> None:
        self.expected, self.abs = expected, 1e-12 if abs is None else abs
        self.rel = (1e-6 if abs is None else 0.0) if rel is None else rel

    def __eq__(self, value: Any) -> bool:
        expected = self.expected
        if isinstance(expected, dict):
            return value.keys() == expected.keys() and all(self._like(expected[k]) == value[k] for k in value)
        if isinstance(expected, list | tuple):
            return len(value) == len(expected) and all(map(eq, map(self._like, expected), value))
        return math.isclose(value, expected, rel_tol=self.rel, abs_tol=self.abs)

    def _like(self, expected: Any) -> Approx:
        return Approx(expected, self.rel, self.abs)


def parametrize(names: str | Sequence[str], rows: Any) -> Any:
    """`pytest.mark.parametrize`: a call for each row."""
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else names

    def decorated(test: Any) -> Any:
        def each(*args: Any, **keywords: Any) -> None:
            for row in rows:
                test(*args, **keywords, **dict(zip(keys, row if len(keys) > 1 else [row], strict=True)))

        return each

    return decorated


def place(error: BaseException) -> list[Any]:
    """The type of an error, and the line of the tests that raised it; 0: none did."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == FILE:
            line = trace.tb_lineno
        trace = trace.tb_next
    return [type(error).__name__, line]


def is_of_program(error: BaseException | None) -> bool:
    """Whether the program raised an error, or one that the test met before this one."""
    while error is not None:
        if any(error is one for one in _of_program):
            return True
        error = error.__cause__ or error.__context__
    return False


def called(owner: int | str, what: str | None, /, *args: Any, **keywords: Any) -> Any:
    """Ask the program (see `guest.called_plainly`). Its exception is raised here (see `exception_of`)."""
    for change in changed_attributes():
        asked(*change)
    return asked(owner, what, *args, **keywords)


def asked(owner: int | str, what: str | None, /, *args: Any, **keywords: Any) -> Any:
    try:
        named = {name: encode(each) for name, each in keywords.items()}
        message = ["call", owner, what, [*map(encode, args)], named]
    except TypeError as error:
        raise CannotBeAsked(f"an argument of the function: {error}") from None
    answer = exchange(message)
    if arguments := answer.get("left") or answer.get("changed"):
        left, named = arguments
        write_back(list(args), [*map(decode, left)])
        write_back(dict(keywords), {name: decode(each) for name, each in named.items()})
    if "error" not in answer:
        return decode(answer["value"])
    _of_program.append(exception_of(*answer["raised"]))
    raise _of_program[-1]


def exception_of(names: list[str], text: str, arguments: Any, attributes: Any) -> BaseException:
    """The exception of the program: of the classes of these names."""
    kinds = [_caught.get(name) or _builtin(name) or _new(name) for name in names]
    kind = kinds[0]
    if kind is not _builtin(names[0]):
        lowest = [one for one in kinds if [*filter(one.__subclasscheck__, kinds)] == [one]]
        kind = type(names[0], tuple(lowest), {"__str__": lambda _: text})
    error: BaseException = kind(*decode(arguments))
    vars(error).update({name: each for name, each in decode(attributes).items() if name not in dir(error)})
    return error


def _builtin(name: str) -> Any:
    kind = vars(builtins).get(name)
    return kind if isinstance(kind, type) and issubclass(kind, BaseException) else None


def _new(name: str) -> type[Exception]:
    """What stands for a class of exceptions of the program."""
    return _caught.setdefault(name, type(name, (Exception,), {}))


# ---------------------------------------------------------------- values in place of the program's


class Anything:
    """A value that takes every operation."""

    def _self(self, *_: Any, **__: Any) -> Any:
        return self

    def _true(self, *_: Any) -> bool:
        return True

    __getattr__ = __getitem__ = __call__ = __neg__ = __pos__ = __abs__ = __invert__ = __round__ = _self
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _self
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __and__ = __or__ = __xor__ = (
        _self
    )
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = _true
    __setitem__ = __delitem__ = lambda *_: None

    def __hash__(self) -> int:
        return 1

    def __iter__(self) -> Any:
        return iter([self])

    def __len__(self) -> int:
        return 1

    def __int__(self) -> int:
        return 1

    __index__ = __int__

    def __float__(self) -> float:
        return 1.0


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
        def __call__(self, *_: Any, **__: Any) -> Any:
            if next(calls, None) is None:
                raise NoEnd
            return value

    module, error = begun(dict.fromkeys(names, StandIn())), None
    for code in (setup, *tests):
        try:
            tree = _WithoutAsserts().visit(ast.parse(code))
            exec(compile(ast.fix_missing_locations(tree), FILE, "exec"), module.__dict__)
            error = None
        except BaseException as raised:
            error = place(raised)
    return error
