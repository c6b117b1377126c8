"""What stands in the tests' process for the program's functions, classes and objects.

The program could answer with an object of its own that says yes to each question. So an object that a call
gave is asked for what it has, and never with what the test expects. It equals no plain value. Its
methods are called only if the tests are of a class, and none that texts and tuples have: `startswith`. An
object that a test itself makes, of a class, is asked everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millrace_sandbox.inside.values import FUNCTION, Here, Remote, encode

OPERATORS = (
    *("eq", "ne", "lt", "le", "gt", "ge", "contains"),
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor"),
)
"""They get what a test expects: `abs(f(1) - 2) < 1e-6`."""
OTHERS = (
    *("neg", "pos", "invert", "abs", "getitem", "setitem", "delitem"),
    *("bool", "float", "hash", "int", "iter", "len", "next", "repr", "reversed", "round", "str"),
)
PLAIN = {name for kind in (str, bytes, int, float, tuple, frozenset) for name in dir(kind)}
"""What plain values have."""

KEPT = 100
"""So many attributes are looked at for a change."""
_given: list[tuple[Object, str, Any, Any]] = []
"""Attributes that a test has, and may change: whose, the name, the value, and what it was."""


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
        vars(self).update(_ask=ask, _has_methods=has_methods, _makes=makes, _is_made=False)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        mine = vars(self)
        result = mine["_ask"](mine["_number"], None, *args, **keywords)
        if mine["_makes"] and isinstance(result, Object):
            vars(result)["_is_made"] = True
        return result

    def __getattr__(self, name: str) -> Any:
        mine = vars(self)
        is_asked = mine["_is_made"] or mine["_makes"]
        if name.startswith("__") or (name in PLAIN and not is_asked):
            raise AttributeError(name)
        value = mine["_ask"](mine["_number"], "getattr", name)
        if type(value).__name__ == FUNCTION and isinstance(value, Object) and not mine["_has_methods"]:
            raise AttributeError(name)
        if isinstance(value, list | dict | set):
            _given.append((self, name, value, encode(value)))
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)["_ask"](vars(self)["_number"], "setattr", name, value)

    def __instancecheck__(self, other: Any) -> bool:
        if isinstance(other, BaseException):
            return vars(self)["_number"] in [kind.__name__ for kind in type(other).__mro__]
        return isinstance(other, Object) and bool(
            vars(self)["_ask"](vars(other)["_number"], "isinstance", self)
        )


def _operator(name: str, what: str) -> Callable[..., Any]:
    def asked(self: Any, *others: Any) -> Any:
        mine = vars(self)
        if what in OTHERS or mine["_is_made"] or isinstance(others[0], Object):
            return mine["_ask"](mine["_number"], what, *others)
        if what == "contains":
            raise TypeError("an object of the program is not asked what is in it")
        return NotImplemented

    return asked


for _what in (*OPERATORS, *OTHERS):
    _name = _what.strip("_")
    setattr(Object, f"__{_name}__", _operator(_name, _what))
    setattr(Object, f"__r{_name}__", _operator(_name, f".__r{_name}__"))


def changed_attributes() -> list[tuple[Object, str, Any]]:
    """What a test has changed since the last call in the values of attributes, which are copies."""
    now = [(owner, name, value, encode(value)) for owner, name, value, _ in _given[-KEPT:]]
    pairs = list(zip(now, _given[-KEPT:], strict=True))
    _given[:] = now
    return [one[:3] for one, before in pairs if one[3] != before[3]]


def stand_ins(ask: Callable[..., Any], names: dict[str, list[Any]]) -> dict[str, Object]:
    """What stands for each name of the tests: a name of the program, and whether it is a class."""
    has_methods = any(name[0].isupper() for name in names)

    def remote(name: str, number: int) -> Object:
        return type(name, (Object,), {})(ask, number, has_methods=has_methods)

    Here.remote = remote
    return {
        name: Object(ask, number, has_methods=has_methods, makes=is_class)
        for name, (number, is_class) in names.items()
    }
