"""Plain values as JSON, between a program and the tests that call its functions.

None, True, False, numbers, texts and lists are themselves. Others have a tag: `{"tuple": [...]}`. An object
of a class of the program has a number, and stays in its process: tests have a `Remote` in its place. One of a
class that the row gives to both has its attributes. All else that is decoded consists of types of Python and
numpy alone, whoever encoded it: so no value can lie about what it equals.
"""

from __future__ import annotations

import datetime
import io
import itertools
import math
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import (
    Callable,
    Coroutine,
    Generator,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    ValuesView,
)
from decimal import Decimal
from fractions import Fraction
from functools import partial
from importlib import import_module
from pathlib import PurePath, PurePosixPath
from typing import Any, ClassVar
from uuid import UUID

_Made = Callable[[Any], Any]
_LISTS: dict[str, tuple[Any, _Made]] = {
    **{kind.__name__: (kind, kind) for kind in (tuple, set, frozenset, deque)},
    "keys": (KeysView, lambda data: dict.fromkeys(data).keys()),
    "items": (ItemsView, lambda data: dict(data).items()),
    "values": (ValuesView, lambda data: dict(enumerate(data)).values()),
}
"""By tag: the type of what consists of values, and what makes one of a list of them."""
_DICTS: dict[str, tuple[Any, _Made]] = {
    "Counter": (Counter, lambda pairs: Counter(dict(pairs))),
    "OrderedDict": (OrderedDict, OrderedDict),
    "dict": (Mapping, dict),
}
"""By tag: a type of tables, and what makes one of pairs."""


def _of_parts(kind: Any, *names: str) -> tuple[Any, _Made, _Made]:
    return kind, lambda one: encode([getattr(one, name) for name in names]), lambda data: kind(*decode(data))


def _stream(kind: Any) -> tuple[Any, _Made, _Made]:
    """A stream in memory, with its place, and without attributes."""

    def made(data: Any) -> Any:
        one = kind()
        one.__setstate__((*decode(data), None))
        return one

    return kind, lambda one: encode(one.__getstate__()[:-1]), made


async def _awaited(data: Any) -> Any:
    """A coroutine of the program, which has run there to its end."""
    return decode(data)


_OTHERS: dict[str, tuple[Any, _Made, _Made]] = {
    "int": (int, hex, lambda digits: int(digits, 16)),
    "bytes": (bytes | memoryview, lambda value: bytes(value).hex(), bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "complex": (complex, lambda value: repr(complex(value.real, value.imag)), complex),
    "array": (array, lambda one: encode([one.typecode, one.tolist()]), lambda data: array(*decode(data))),
    "coroutine": (Coroutine, lambda one: encode(import_module("asyncio").run(one)), _awaited),
    "StringIO": _stream(io.StringIO),
    "BytesIO": _stream(io.BytesIO),
    "range": _of_parts(range, "start", "stop", "step"),
    "slice": _of_parts(slice, "start", "stop", "step"),
    "fraction": _of_parts(Fraction, "numerator", "denominator"),
    "timedelta": _of_parts(datetime.timedelta, "days", "seconds", "microseconds"),
    "decimal": (Decimal, str, Decimal),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "path": (PurePath, str, PurePosixPath),
    "uuid": (UUID, str, UUID),
    "ellipsis": (type(...), str, lambda _: ...),
}
"""By tag: a type, what JSON has for a value, and what makes the value of that."""
VALUES = (  # types with attributes that no object of a program may stand for
    *(str, int, float, list, set, dict, bytes, tuple, frozenset, deque, Counter, array, Fraction, Decimal),
    *(datetime.datetime, datetime.timedelta, complex, range, PurePosixPath, UUID),
)
_FACTORIES = {kind.__name__: kind for kind in (int, float, str, list, dict, set, tuple, bool)}
"""Of a `defaultdict`: what it makes for a key that is missing."""
_TEXTS = datetime.date | datetime.time | datetime.timedelta | complex | UUID | PurePath
PROGRAM = "solution"  # the module of a program
FUNCTION = "function"  # the name of what can be called
MADE = "made"  # what a class is asked for by a call
SEEDED = "seeded"  # what a program is asked for before a call, if tests have set a seed
DIGITS_BITS = 4_096  # Python writes and reads no larger numbers as digits
ARRAYS = "biufcSUmM"  # the kinds of arrays of numpy whose values are numbers, texts and times
LONG = 1_000  # what tests hold is the same here and there as long as it is no longer than this
FIXED = (int, float, str, tuple)  # types of what never changes
ABOVE = ("builtins", "collections", "collections.abc", "enum")  # modules of classes above one of a program


class Remote:
    """In the process of the tests: an object of the program, or what has this name there."""

    def __init__(self, number: int | str) -> None:
        inside(self)["#number"] = number


inside = vars(Remote)["__dict__"].__get__
"""What a stand-in has itself, by keys that are no names of attributes: those are the program's."""


class Here:
    """What values mean in this process. `objects` are those of the program's classes, by number. Of a process
    of tests `remote` makes what stands for them. `given` are the classes that the row gives to both, and
    `names` those of the module. `items` of an iterator come at once: it may have no end, or take long. With 0
    each is asked for, as it is here."""

    objects: ClassVar[list[Any]] = []
    numbers: ClassVar[dict[int, int]] = {}
    names: ClassVar[dict[str, Any]] = {}
    items: int = 100
    given: frozenset[str] = frozenset()
    remote: Callable[..., Remote] | None = None


# Keys of a table that stands for what JSON has not: its members, its digits, its text, a number and its
# text. Tests that are JSON may expect such a value in several forms (millrace_sandbox/code_tests.py).
SET, BYTES, TEXT, NUMBER = "\0set", "\0bytes", "\0text", "\0number"


def encode(value: Any) -> Any:
    """The value for JSON. A subclass becomes its plain base.

    Raises:
        TypeError: the value is of another type.
        RecursionError: it is too deep, or contains itself.
    Degenerate:
        An iterator or a generator of a program -> its next items, and the number that the rest has.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, Remote):
        return {"object": [type(value).__name__, inside(value)["#number"]]}
    if Here.remote is None and isinstance(value, FIXED) and type(value).__module__ == PROGRAM:
        return {"own": [of_class(value)["object"], _plain(value)]}
    return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, int):
        number = int.__index__(value)
        return number if number.bit_length() < DIGITS_BITS else {"int": hex(number)}
    if isinstance(value, float):
        plain = float.__float__(value)
        return plain if math.isfinite(plain) else {"float": repr(plain)}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encode(each) for each in value]
    if isinstance(value, type) and issubclass(value, Remote):
        return {"object": [FUNCTION, vars(value)["#kind"]]}
    return _composed(value) or _other(value)


def _composed(value: Any) -> dict[str, Any] | None:
    """What consists of values; None: the value does not."""
    if isinstance(value, tuple) and (names := getattr(value, "_fields", None)):
        return {"namedtuple": [type(value).__name__, list(names), [encode(each) for each in value]]}
    for tag, (kind, _) in _DICTS.items():
        if isinstance(value, kind):
            factory: Any = getattr(value, "default_factory", None)
            pairs = [[encode(key), encode(each)] for key, each in value.items()]
            is_known = factory in _FACTORIES.values()
            return {"defaultdict": [factory.__name__, pairs]} if is_known else {tag: pairs}
    if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
        items = [encode(each) for each in itertools.islice(value, None if Here.remote else Here.items)]
        rest = numbered(type(value).__name__, value) if len(items) == Here.items and not Here.remote else []
        return {"generator" if isinstance(value, Generator) else "iterator": [items, rest]}
    for tag, (kind, _) in _LISTS.items():
        if isinstance(value, kind):
            return {tag: [encode(each) for each in value]}
    return None


def _other(value: Any) -> Any:
    for tag, (kind, written, _) in _OTHERS.items():
        if isinstance(value, kind) and not getattr(value, "closed", False):
            return {tag: written(value)}
    if (name := type(value).__name__) in Here.given and Here.names.get(name) is type(value):
        return {"given": [name, {name: encode(each) for name, each in vars(value).items()}]}
    if type(value).__module__ == PROGRAM:
        return of_class(value)
    if isinstance(value, type) and value.__module__ in ABOVE:
        return {"type": [value.__module__, value.__name__]}
    if (numpy := sys.modules.get("numpy")) and isinstance(value, numpy.generic):
        return encode(value.item())
    if numpy and isinstance(value, numpy.ndarray) and value.dtype.kind in ARRAYS:
        return {"ndarray": [value.dtype.str, encode(value.tolist())]}
    if callable(value) and Here.remote is None:
        return numbered(FUNCTION, value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent")


def numbered(name: str, value: Any) -> dict[str, Any]:
    """What stands for an object of the program, which is kept."""
    if id(value) not in Here.numbers:
        Here.numbers[id(value)] = len(Here.objects)
        Here.objects.append(value)
    return {"object": [name, Here.numbers[id(value)]]}


def of_class(value: Any) -> dict[str, Any]:
    """An object, with the number of its class, and those of Python above it."""
    kind = numbered(FUNCTION, type(value))["object"]
    above = [[one.__module__, one.__name__] for one in type(value).__mro__[:-1] if one.__module__ in ABOVE]
    return {"object": [*numbered(type(value).__name__, value)["object"], kind[1], above]}


def of_python(module: str, name: str) -> type:
    """A class of Python. Raises: LookupError, AttributeError, ValueError: no value may name it."""
    kind = getattr(sys.modules[ABOVE[ABOVE.index(module)]], name)
    if not isinstance(kind, type):
        raise ValueError(f"{name!r} is no class")
    return kind


def decode(data: Any) -> Any:
    """The value. Raises: LookupError, ValueError, TypeError, ArithmeticError: `encode` did not make that."""
    if isinstance(data, list):
        return [decode(each) for each in data]
    if not isinstance(data, dict):
        return data
    ((tag, inner),) = data.items()
    match tag:
        case "float" | "type":
            return float(inner) if tag == "float" else of_python(*inner)
        case "namedtuple":
            return _namedtuple(*inner)
        case "object" | "given" | "own":
            return _own(*inner) if tag == "own" else _object(tag, inner)
        case "defaultdict":
            return defaultdict(_FACTORIES[inner[0]], _pairs(inner[1]))
        case "iterator" | "generator":
            return _iterator(tag, *map(decode, inner))
        case "ndarray":
            return _array(*inner)
        case _ if tag in _DICTS:
            return _DICTS[tag][1](_pairs(inner))
        case _ if tag in _LISTS:
            return _LISTS[tag][1]([decode(each) for each in inner])
        case _ if tag in _OTHERS:
            return _OTHERS[tag][2](inner)
    raise ValueError(f"no value has the tag {tag!r}")


def _namedtuple(name: str, fields: list[str], items: list[Any]) -> Any:
    """Raises: ValueError: an item could stand for a method."""
    values = [*map(decode, items)]
    for field, value in zip(fields, values, strict=True):
        if callable(value) and any(hasattr(kind, field) for kind in VALUES):
            raise ValueError(f"{field!r} of {name!r} stands for a method")
    return namedtuple(name, fields)(*values)


def _iterator(tag: str, items: list[Any], rest: Any) -> Any:
    if Here.items == 0 and isinstance(rest, Remote):
        ask = partial(inside(rest)["#ask"], inside(rest)["#number"])
        return _steps(ask) if tag == "generator" else iter(partial(ask, "next"), ask)
    every = itertools.chain(items, rest)
    return every if tag == "iterator" else (each for each in every)


def _steps(ask: Callable[..., Any]) -> Generator[Any, Any, Any]:
    """A generator of the program, item by item. What is sent and thrown here goes there."""
    question: tuple[Any, ...] = ("next",)
    while True:
        try:
            item = ask(*question)
        except StopIteration as end:
            return end.value
        try:
            sent = yield item
            question = ("next",) if sent is None else (".send", sent)
        except GeneratorExit:
            ask(".close")
            raise
        except BaseException as error:
            question = (".throw", type(error), error.args)


def _own(stand_in: list[Any], plain: Any) -> Any:
    """A number, a text or a tuple of a class of the program: a plain one. Other attributes are there."""
    one, value = _object("object", stand_in), decode(plain)
    shown = {
        f"__{what.__name__}__": lambda _, *form, what=what: what(one, *form) for what in (str, repr, format)
    }
    more = {
        **shown,
        "__class__": property(lambda _: one.__class__),
        "__getattr__": lambda _, name: getattr(one, name),
    }
    made = next(kind for kind in FIXED if isinstance(value, kind))
    own: Any = made.__new__(type(type(one).__name__, (type(value), Remote), more), value)
    inside(own).update(inside(one))
    return own


def _object(tag: str, inner: Any) -> Any:
    if tag == "object":
        return Here.remote(*inner) if Here.remote else resolved(inner[1])
    if inner[0] not in Here.given:
        raise ValueError(f"the row gives no class {inner[0]!r}")
    made = object.__new__(Here.names[inner[0]])
    if methods := [name for name in inner[1] if callable(getattr(made, name, None))]:
        raise ValueError(f"{methods[0]!r} is a method of {inner[0]!r}")
    vars(made).update({name: decode(each) for name, each in inner[1].items()})
    return made


def resolved(number: int | str) -> Any:
    """The object of that number; what has that name, or the method of that name of a class `Solution`.

    Raises: NameError: the program has none.
    """
    if isinstance(number, int):
        return Here.objects[number]
    found = Here.names.get(number)
    if found is None and (solution := Here.names.get("Solution")) is not None:
        found = Here.names[number] = getattr(solution(), number, None)
    if not callable(found):
        raise NameError(f"the program defines no function {number!r}")
    return found


def _pairs(data: Any) -> list[tuple[Any, Any]]:
    return [(decode(key), decode(each)) for key, each in data]


def _array(kind: str, data: Any) -> Any:
    """An array of numbers, texts or times; where nobody has imported numpy, a list."""
    numpy, value = sys.modules.get("numpy"), decode(data)
    if numpy is None:
        return value
    if (dtype := numpy.dtype(kind)).kind not in ARRAYS:
        raise ValueError(f"no array has values of the kind {kind!r}")
    return numpy.array(value, dtype)


def to_json(value: Any) -> Any:
    """What stands in JSON for a value that it does not know, for tests that are JSON: what has an order is a
    list.

    Raises: TypeError: nothing does.
    """
    if isinstance(value, Decimal | Fraction):
        return {NUMBER: [int(value) if value == int(value) else float(value), str(value)]}
    if isinstance(value, set | frozenset):
        return {SET: list(value)}
    if isinstance(value, bytes | bytearray | memoryview):
        return {BYTES: bytes(value).hex()}
    if isinstance(value, _TEXTS):
        return {TEXT: str(value)}
    if hasattr(value, "tolist"):  # of numpy, or an array
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent")


def write_back(value: Any, left: Any) -> Any:
    """Give an argument the content that a function has left in it. Returns the value: it is the same object
    where its type can change."""
    match value, left:
        case (Remote(), _) | (_, Remote()):
            return left
        case list(), list():
            value[:] = [*map(write_back, value, left), *left[len(value) :]]
        case dict(), dict():
            items = {
                key: write_back(value[key], each) if key in value else each for key, each in left.items()
            }
            value.clear()
            value.update(items)
        case (set(), set()) | (deque(), deque()):
            value.clear()
            (value.update if isinstance(value, set) else value.extend)(left)
        case bytearray(), bytearray():
            value[:] = left
        case (io.StringIO(), io.StringIO()) | (io.BytesIO(), io.BytesIO()):
            value.__setstate__(left.__getstate__())
        case tuple(), tuple() if len(value) == len(left):
            for one, other in zip(value, left, strict=True):
                write_back(one, other)
            return value if value == left else left
        case _ if type(value) is type(left) and type(value).__name__ in Here.given:
            for name, each in vars(left).items():
                vars(value)[name] = write_back(vars(value).get(name), each)
        case _:
            return left
    return value
