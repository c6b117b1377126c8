"""The program's own process: it locks itself up, and only then sees a line of what the model wrote.

Two ways to run. With a function: messages come through descriptor 3, one call at a time, and answers leave
through 4. Without: the program reads descriptor 0 and writes descriptor 1. A message is its length (8 bytes,
little-endian) and JSON. Nothing in this process knows what an answer should be.
"""

from __future__ import annotations

import atexit
import builtins
import collections
import copy
import ctypes
import functools
import importlib
import json
import operator
import os
import random
import struct
import sys
import threading
from contextlib import suppress
from types import ModuleType
from typing import Any, TextIO

from millrace.devices.syscalls import call, prctl
from millrace_sandbox.inside import landlock, seccomp, values
from millrace_sandbox.inside.limits import Limits, MiB, apply

CALLS, REPLIES = 3, 4
_NAMES = "typing string re datetime random statistics functools itertools operator copy math bisect heapq"
COMMON = tuple(map(importlib.import_module, (*_NAMES.split(), "collections")))
# The types of what a program may change after it has given it to a test.
CHANGING = (list, dict, set, bytearray, *map(vars(collections).get, ("deque", "Counter", "defaultdict")))
HELD_BYTES = 2_000  # so large may it be
_told: dict[int, Any] = {}  # what tests know of it, by number
RECURSION_MAX = 50_000
"""As LiveCodeBench sets it."""
STACK_BYTES = 64 * MiB
"""Programs of contests ask for the stack of a thread by what a judge has, and need less."""
INPUT = 3
"""An empty file for the input of a program that reads and prints."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
CAPABILITY_VERSION_3 = 0x20080522
NAME = values.PROGRAM


def lock(level: str, limits: Limits, readable: list[str], private: str) -> None:
    """Confine this process and all its children, for good. Raises OSError: a layer cannot be had."""
    prctl(PR_SET_DUMPABLE, 0)
    apply(limits, count_tasks=level == "namespaces")
    drop_capabilities()
    if level != "limits":
        prctl(seccomp.PR_SET_NO_NEW_PRIVS, 1)
        landlock.restrict(readable, [private, "/dev/null"])
        seccomp.install(limits, threads=level == "namespaces")
    if level == "landlock":
        run_threads_in_place()


def run_threads_in_place() -> None:
    """Where no thread can start, `start` runs it to its end. Programs of contests begin one for its stack."""
    begin = threading.Thread.start

    def start(thread: Any) -> Any:
        if thread.daemon or getattr(thread._target, "__module__", "") == "concurrent.futures.thread":
            return begin(thread)  # such a thread would wait for others without end: this raises
        thread._started.set()
        try:
            thread.run()
        except SystemExit:
            pass
        except Exception:
            sys.excepthook(*sys.exc_info())

    def join(thread: Any, timeout: float | None = None) -> None:
        """It has ended."""

    def is_alive(thread: Any) -> bool:
        return thread is threading.main_thread()

    for method in (start, join, is_alive):
        setattr(threading.Thread, method.__name__, method)


def drop_capabilities() -> None:
    header = ctypes.create_string_buffer(struct.pack("=Ii", CAPABILITY_VERSION_3, 0))
    call("capset", header, ctypes.create_string_buffer(24))


def run(program: dict[str, Any]) -> None:
    """Execute `program["code"]`; with `program["function"]`, answer calls until there are no more."""
    function = program["function"]
    module = begun(NAME if function else "__main__")
    values.Here.names, values.Here.given = module.__dict__, frozenset(program.get("shared", ()))
    values.Here.items = 0 if program.get("by_steps") else values.Here.items
    sys.setrecursionlimit(RECURSION_MAX)
    stack_size = threading.stack_size
    threading.stack_size = lambda size=0: stack_size(min(size, STACK_BYTES))
    if function:
        code = program["code"]
        if program.get("given"):
            answer(os.write, loaded(program["given"], module))
            code = receive(CALLS)
        sees_changes = program.get("sees_changes", False)
        serve(code, function, module, program.get("plain", False), sees_changes)
    else:
        if program["as_file"]:
            read_as_file(INPUT)
        os.close(INPUT)
        sys.stdin = os.fdopen(0, encoding="utf-8", errors="surrogateescape", closefd=False)
        script(program["code"], module)


def read_as_file(descriptor: int) -> None:
    """Make the standard input a file, as judges of contests have it: its size is known, and it can be mapped
    and read again."""
    while part := os.read(0, 1 << 20):
        while part:
            part = part[os.write(descriptor, part) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.dup2(descriptor, 0)


def begun(name: str) -> ModuleType:
    """An empty module of that name, for code of others, which may call `exit` as in any Python."""
    module = ModuleType(name)
    sys.modules[name] = module
    sys.argv = [NAME + ".py"]
    sys.stdout, sys.stderr = written(1, buffering=-1), written(2, buffering=1)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc, assignment]
    vars(builtins).update({**common_names(), **vars(builtins), "exit": sys.exit, "quit": sys.exit})
    sys.modules["pytest"] = Unused("pytest")
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    return module


class Unused(ModuleType):
    """pytest, for a program that has tests of its own behind it. Nobody runs these."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *given: Any, **_: Any) -> Any:
        return given[0] if given and callable(given[0]) else self


def common_names() -> dict[str, Any]:
    """What LeetCode, APPS and LiveCodeBench have imported before a program: it may use `List`, `inf` or
    `heapq` without an import."""
    names: dict[str, Any] = {}
    for module in COMMON:
        public = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
        names.update({name: getattr(module, name) for name in public})
    return names | {module.__name__: module for module in (*COMMON, sys)}


def written(descriptor: int, buffering: int) -> TextIO:
    return open(descriptor, "w", buffering, encoding="utf-8", errors="backslashreplace", closefd=False)


def script(code: str, module: ModuleType) -> None:
    """Run a program that reads its input and prints its answer. Exit as Python would."""
    status = 0
    try:
        exec(compile(code, NAME + ".py", "exec"), module.__dict__)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        status = MEMORY if isinstance(error, MemoryError) else 1
        sys.excepthook(*sys.exc_info())
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.__stdout__, sys.stderr):
            if stream is not None:
                stream.flush()
    finally:
        os._exit(status & 0xFF)


MEMORY = 77
"""Exit status of a program that got no memory."""


def loaded(code: str, module: ModuleType) -> bytes:
    """Execute code that comes before the program. Returns the answer."""
    try:
        exec(compile(code, "prompt.py", "exec"), module.__dict__)
    except BaseException as error:
        return described(error)
    return b'{"value":null}'


def serve(code: str, function: str, module: ModuleType, plain: bool, sees_changes: bool = False) -> None:
    """Load the program, and answer calls with `{"value": ...}` or `{"error": ..., "memory": ...}`. With
    the value None, `left` may have the arguments as they are after the call; with another value and
    `sees_changes`, `changed` may have them.

    `plain`: a call is as `called_plainly` has it, and its values are as inside/values.py has them.
    """
    write, dumps = os.write, json.dumps
    try:
        exec(compile(code, NAME + ".py", "exec"), module.__dict__)
        called = values.resolved(function)
        reply = b'{"value":null}'
    except BaseException as error:
        called, reply = None, described(error)
    answer(write, reply)
    plainly = functools.partial(called_plainly, sees_changes=sees_changes)
    ask = plainly if plain else functools.partial(called_once, called)
    while called is not None:
        arguments = receive(CALLS)
        try:
            reply = dumps(ask(*arguments), default=values.to_json).encode()
        except BaseException as error:
            more = {"raised": parts_of(error), **hold(None, None, arguments[-1])} if plain else {}
            reply = described(error, **more)
        answer(write, reply)
    sys.stdout.flush()
    os._exit(0)


def called_once(called: Any, *arguments: Any) -> dict[str, Any]:
    """What a call gave. A function that gives None may have changed its first argument."""
    value = called(*arguments)
    return {"value": None, "left": arguments[:1]} if value is None and arguments else {"value": value}


def called_plainly(
    owner: int | str, asked: str | None, arguments: list[Any], keywords: Any, held: Any, *, sees_changes: bool
) -> dict[str, Any]:
    """What a call gave. Of a function that gives None, also its arguments, if it has changed them; with
    `sees_changes` of each function.

    Args:
        owner: whom the tests ask: a name of the program, or the number of an object.
        asked: None: to call it. `MADE`: to call it for an object of a class, also of one above which is a
            built-in class. `.name`: a method of it. Else an operator, or a built-in function.
        held: the lists, tables and sets that the tests have of earlier calls, by number, and their content if
            the tests have changed it. `held` of the answer is what the program has changed.
    """
    for number, content in held:
        if content is not None:
            values.write_back(values.Here.objects[number], values.decode(content))
    given = [values.decode(each) for each in arguments]
    named = {name: values.decode(each) for name, each in keywords.items()}
    found: Any = values.resolved(owner)
    if asked is not None and asked.startswith("."):
        found = getattr(found, asked[1:])
    elif asked not in (None, values.MADE):
        found = functools.partial(FUNCTIONS[asked], found)
    result = found(*given, **named)
    is_type = asked == "getattr" and isinstance(result, type) and result.__module__ != "builtins"
    is_made = asked == values.MADE and type(result).__module__ == values.PROGRAM
    kept = (
        values.numbered(values.FUNCTION, result) if is_type else values.of_class(result) if is_made else None
    )
    value = kept or values.encode(result)
    left = [arguments, keywords]
    if (value is None or sees_changes) and 'tor": [' not in json.dumps([arguments, keywords]):
        with suppress(TypeError):  # else it has put something into one that cannot be sent
            left = [[*map(values.encode, given)], {name: values.encode(each) for name, each in named.items()}]
    told = {"value": value, **hold(result, value, held)}
    if sees_changes:
        told["given"] = [number_of(*pair) for pair in zip(given, left[0], strict=True)]
    return told if left == [arguments, keywords] else {**told, "left" if value is None else "changed": left}


def hold(result: Any, value: Any, held: list[Any]) -> dict[str, Any]:
    """The number of what a call gave, if it can change, and what has changed of what earlier calls gave."""
    here, told, numbers = values.Here, dict[str, Any](), {number for number, _ in held}
    for number in _told.keys() - numbers:
        del _told[number], here.numbers[id(here.objects[number])]
        here.objects[number] = None
    now = dict(_told)
    for number in (one for one in numbers if len(here.objects[one]) <= values.LONG):
        with suppress(Exception):  # else it has something in it now that cannot be sent
            now[number] = values.encode(here.objects[number])
    if news := [[number, content] for number, content in now.items() if content != _told[number]]:
        told["held"] = news
    _told.update(now)
    return {**told, "number": number_of(result, value)}


def number_of(one: Any, content: Any) -> int | None:
    """Of what may change, and is small. None: of another value."""
    if type(one) not in CHANGING or len(text := json.dumps(content)) > HELD_BYTES or 'tor": [' in text:
        return None
    number: int = values.numbered("", one)["object"][1]
    _told[number] = content
    return number


def draw_on(_: Any, name: str, state: Any) -> None:
    """Draw random numbers from where the tests are, which have set a seed."""
    (random.setstate if name == "random" else sys.modules["numpy"].random.set_state)(state)


FUNCTIONS = {**vars(operator), **vars(builtins), "copy": copy.copy, "deepcopy": copy.deepcopy}
"""By name: what tests ask of an object."""
FUNCTIONS[values.SEEDED] = draw_on


def described(error: BaseException, **more: Any) -> bytes:
    told = {"error": text_of(error), "memory": isinstance(error, MemoryError), **more}
    return json.dumps(told).encode()


def parts_of(error: BaseException, depth: int = 3) -> list[Any]:
    """The names of an exception's classes, its text, its arguments, its attributes, and what came before."""
    kinds = [kind for kind in type(error).__mro__ if issubclass(kind, BaseException)]
    names = [f"{kind.__module__}.{kind.__name__}" for kind in kinds]
    text = text_of(error).partition(": ")[2]
    others = (error.__cause__, error.__context__)
    before: list[Any] = [parts_of(one, depth - 1) if one and depth else None for one in others]
    before.append(error.__suppress_context__)
    try:
        return [names, str(error), values.encode(error.args), values.encode(vars(error)), before]
    except BaseException:
        return [names, text, values.encode((text,)), values.encode({}), before]


def text_of(error: BaseException) -> str:
    """An exception of a class of its own has the name of the built-in class above it, which tests catch."""
    try:
        kinds = type(error).__mro__
        kind = next((one for one in kinds if one.__module__ == "builtins"), kinds[0])
        name = kinds[0] if kind in (Exception, BaseException) else kind
        more = ": here are the standard library and numpy" if kind is ModuleNotFoundError else ""
        return f"{name.__name__}: {error}{more}"[:300]
    except BaseException:
        return "an error without a message"


def answer(write: Any, reply: bytes) -> None:
    data = struct.pack("<Q", len(reply)) + reply
    while data:
        data = data[write(REPLIES, data) :]


def receive(descriptor: int) -> Any:
    """The next message. The process ends when there are no more."""
    (length,) = struct.unpack("<Q", exactly(descriptor, 8))
    return json.loads(exactly(descriptor, length))


def exactly(descriptor: int, count: int) -> bytes:
    parts = []
    while count:
        part = os.read(descriptor, min(count, 1 << 20))
        if not part:
            sys.stdout.flush()
            os._exit(0)
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
