"""What stands in the tests' process for the program's functions, classes and objects.

The program could answer with an object of its own that says yes to each question. So an object that a call
gave is asked for what it has, and never with what the test expects. It equals no plain value. Its
methods are called only if the tests are of a class, and none that texts and tuples have: `startswith`. An
object that a test itself makes, of a class, is asked everything.
"""

from __future__ import annotations

import builtins
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from millrace_sandbox.inside.values import FUNCTION, MADE, Here, Remote, inside, of_python

ARITHMETIC = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift"),
)
IN_PLACE = tuple(f"i{name.strip('_')}" for name in ARITHMETIC)
COMPARED = ("eq", "ne", "lt", "le", "gt", "ge", "contains")
OPERATORS = (*IN_PLACE, *ARITHMETIC, *COMPARED, "matmul", "divmod")
"""They get what a test expects: `abs(f(1) - 2) < 1e-6`."""
OTHERS = (
    *("neg", "pos", "invert", "abs", "getitem", "setitem", "delitem"),
    *("bool", "float", "hash", "int", "iter", "len", "next", "repr", "reversed", "round", "str", "format"),
    "delattr",
)
PLAIN = {
    name for kind in (str, bytes, int, float, tuple, frozenset) for name in dir(kind)
}  # what plain values have

ASKED = ("__name__", "__bases__", "__members__")  # the attributes of Python that an object is asked for


class NotAsked(AttributeError, TypeError):
    """What Python raises where something is missing: the object of the program is not asked for it."""


class Object(Remote):
    """An object of the program, or of a name there: it is called there, and asked for each attribute.

    Args:
        ask: sends a question, and gives the answer: `(owner, what, *arguments, **keywords)`.
        has_methods: the tests are of classes, by the capital letters.
        makes: it is one of them for sure. What its call gives is an object that the test makes.
    """

    def __init__(
        self, ask: Callable[..., Any], number: int | str, *, has_methods: bool, makes: bool = False
    ) -> None:
        super().__init__(number)
        mine = {"#ask": ask, "#has_methods": has_methods, "#makes": makes, "#is_made": False}
        inside(self).update(mine)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        mine = inside(self)
        result = mine["#ask"](mine["#number"], MADE if mine["#makes"] else None, *args, **keywords)
        if mine["#makes"] and isinstance(result, Object):
            inside(result)["#is_made"] = True
        return result

    def __getattr__(self, name: str) -> Any:
        mine = inside(self)
        is_asked = mine["#is_made"] or mine["#makes"]
        if (name.startswith("__") and name not in ASKED) or (name in PLAIN and not is_asked):
            raise NotAsked(name)
        value = mine["#ask"](mine["#number"], "getattr", name)
        is_function = type(value).__name__ == FUNCTION and isinstance(value, Object)
        if (is_function or isinstance(value, type)) and not mine["#has_methods"]:
            raise NotAsked(name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        inside(self)["#ask"](inside(self)["#number"], "setattr", name, value)

    def __instancecheck__(self, other: Any) -> bool:
        if isinstance(other, Remote):
            return _ask(other, "isinstance", self) is True
        is_error = isinstance(other, BaseException)
        return is_error and inside(self)["#number"] in [kind.__name__ for kind in type(other).__mro__]

    def __subclasscheck__(self, other: Any) -> bool:
        return isinstance(other, Object) and _ask(other, "issubclass", self) is True

    def __enter__(self) -> Any:
        return _same(self, ".__enter__")

    def __exit__(self, kind: type | None, *_: Any) -> Any:
        is_known = kind is None or vars(builtins).get(kind.__name__) is kind
        is_caught = _ask(self, ".__exit__", kind if is_known else Exception, None, None)
        is_of_test = kind is None or issubclass(kind, AssertionError) or not issubclass(kind, Exception)
        return is_caught and not is_of_test

    def __copy__(self) -> Any:
        return _same(self, "copy")

    def __deepcopy__(self, _: Any) -> Any:
        return _same(self, "deepcopy")

    @property
    def __dict__(self) -> Any:  # type: ignore[override]  # what the program's object has
        return _ask(self, "getattr", "__dict__")


def _ask(stand_in: Remote, what: str, *arguments: Any) -> Any:
    mine = inside(stand_in)
    return mine["#ask"](mine["#number"], what, *arguments)


def _same(one: Object, what: str, *arguments: Any) -> Any:
    """The object after a change, or a copy of it, is as much the test's as the object."""
    result = _ask(one, what, *arguments)
    if isinstance(result, Object):
        inside(result)["#is_made"] |= inside(one)["#is_made"]
    return result


def _operator(name: str, what: str) -> Callable[..., Any]:
    def asked(self: Any, *others: Any) -> Any:
        mine = inside(self)
        if what in OTHERS or mine["#is_made"] or isinstance(others[0], Remote) or _is_class(others[0]):
            return (_same if what in IN_PLACE else _ask)(self, what, *others)
        if what == "contains":
            raise NotAsked("an object of the program is not asked what is in it")
        return NotImplemented

    return asked


for _what in (*OPERATORS, *OTHERS):
    _name = _what.strip("_")
    setattr(Object, f"__{_name}__", _operator(_name, _what))
    setattr(Object, f"__r{_name}__", _operator(_name, f".__r{_name}__"))


def _is_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Object)


def _seen(name: str, kind: int | None, above: Sequence[Any]) -> dict[str, Any]:
    """What `isinstance` sees of an object whose class has classes of Python above it: those, too."""
    known = [of_python(*each) for each in above]
    lowest = [one for one in known if [*filter(one.__subclasscheck__, known)] == [one]]
    with suppress(TypeError):
        seen = types.new_class(name, (Object, *lowest))
        type.__setattr__(seen, "#kind", kind)
        return {"__class__": property(lambda _: seen)}
    return {}


def stand_ins(ask: Callable[..., Any], names: dict[str, list[Any]]) -> dict[str, Object]:
    """What stands for each name of the tests: a name of the program, and whether it is a class."""
    has_methods = any(name[0].isupper() for name in names)

    kinds: dict[int | None, type[Object]] = {}

    def remote(name: str, number: int, kind: int | None = None, above: Sequence[Any] = ()) -> Object:
        if kind is None or kind not in kinds:
            seen = _seen(name, kind, above)
            kinds[kind] = type(name, (Object,), {"#kind": kind, **seen})
        return kinds[kind](ask, number, has_methods=has_methods)

    Here.remote = remote
    return {
        name: Object(ask, number, has_methods=has_methods, makes=is_class)
        for name, (number, is_class) in names.items()
    }
