"""The tests' own process: it runs asserts, and asks through its descriptors for each call of the program.

It is confined as a program is, and is another process than the program. The program's values come as data
(inside/values.py). A message names a test; the answer is `["call", ...]`, and then the next message has what
the call gave; or it is how the test ended: `["passed"]`, `["failed", why]` or `["refused", why]`.
"""

from __future__ import annotations

import builtins
import json
import os
from types import ModuleType
from typing import Any

from millrace.sandbox.inside import guest
from millrace.sandbox.inside.values import decode, encode


class CannotBeAsked(BaseException):
    """The test wants what no message can say. No `except` of a test catches this by mistake."""


def run(program: dict[str, Any]) -> None:
    """Run `program["code"]`, where each of `program["names"]` is the program's function, and then each test
    that is asked for."""
    names = program["names"]
    module = guest.begun("tests")
    module.__dict__.update(dict.fromkeys(names, called))
    code = program["code"]
    while True:
        code = exchange(ended(code, module, names))


def exchange(message: list[Any]) -> Any:
    """Send a message, and wait for the next one. The process ends when there is none."""
    guest.answer(os.write, json.dumps({"value": message}).encode())
    return guest.receive(guest.CALLS)


def ended(code: str, module: ModuleType, names: list[str]) -> list[Any]:
    try:
        exec(compile(code, "tests", "exec"), module.__dict__)
    except CannotBeAsked as error:
        return ["refused", str(error)]
    except BaseException as error:
        return ["failed", guest.text_of(error)]
    changed = [name for name in names if module.__dict__.get(name) is not called]
    return ["refused", f"they define {changed[0]} themselves"] if changed else ["passed"]


def called(*args: Any, **keywords: Any) -> Any:
    """Call the program's function. Its exception is raised here, as the built-in exception of that name."""
    try:
        message = ["call", [*map(encode, args)], {name: encode(each) for name, each in keywords.items()}]
    except TypeError as error:
        raise CannotBeAsked(f"an argument of the function: {error}") from None
    answer = exchange(message)
    if "error" not in answer:
        return decode(answer["value"])
    name, _, text = answer["error"].partition(": ")
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        raise kind(text)
    raise Exception(answer["error"])
