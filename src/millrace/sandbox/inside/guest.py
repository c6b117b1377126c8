"""The program's own process: it locks itself up, and only then sees a line of what the model wrote.

Two ways to run. With a function: messages come through descriptor 3, one call at a time, and answers leave
through 4. Without: the program reads descriptor 0 and writes descriptor 1. A message is its length (8 bytes,
little-endian) and JSON. Nothing in this process knows what an answer should be.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import json
import os
import random
import struct
import sys
from types import ModuleType
from typing import Any, TextIO

from millrace.sandbox.inside import landlock, seccomp
from millrace.sandbox.inside.limits import Limits, apply
from millrace.sandbox.inside.syscalls import call, prctl
from millrace.sandbox.inside.values import decode, encode

CALLS, REPLIES = 3, 4
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
CAPABILITY_VERSION_3 = 0x20080522
NAME = "solution"


def lock(level: str, limits: Limits, readable: list[str], private: str) -> None:
    """Confine this process and all its children, for good. Raises OSError: a layer cannot be had."""
    prctl(PR_SET_DUMPABLE, 0)
    apply(limits, count_tasks=level == "namespaces")
    drop_capabilities()
    if level != "limits":
        prctl(seccomp.PR_SET_NO_NEW_PRIVS, 1)
        landlock.restrict(readable, [private, "/dev/null"])
        seccomp.install(limits, threads=level == "namespaces")


def drop_capabilities() -> None:
    header = ctypes.create_string_buffer(struct.pack("=Ii", CAPABILITY_VERSION_3, 0))
    call("capset", header, ctypes.create_string_buffer(24))


def run(program: dict[str, Any]) -> None:
    """Execute `program["code"]`; with `program["function"]`, answer calls until there are no more."""
    function = program["function"]
    module = begun(NAME if function else "__main__")
    if function:
        code = program["code"]
        if program.get("given"):
            answer(os.write, loaded(program["given"], module))
            code = receive(CALLS)
        serve(code, function, module, program.get("plain", False))
    else:
        script(program["code"], module)


def begun(name: str) -> ModuleType:
    """An empty module of that name, for code of others, which may call `exit` as in any Python."""
    module = ModuleType(name)
    sys.modules[name] = module
    sys.argv = [NAME + ".py"]
    sys.stdout, sys.stderr = written(1, buffering=-1), written(2, buffering=1)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc, assignment]
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    random.seed(0)
    return module


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


def serve(code: str, function: str, module: ModuleType, plain: bool) -> None:
    """Load the program, and answer calls with `{"value": ...}` or `{"error": ..., "memory": ...}`.

    `plain`: a call has arguments and keywords, and they and the answers are as inside/values.py has them.
    """
    write, dumps = os.write, json.dumps
    try:
        exec(compile(code, NAME + ".py", "exec"), module.__dict__)
        called = find(module, function)
        reply = b'{"value":null}'
    except BaseException as error:
        called, reply = None, described(error)
    answer(write, reply)
    while called is not None:
        arguments = receive(CALLS)
        try:
            reply = dumps(
                {"value": called_plainly(called, *arguments) if plain else called(*arguments)}
            ).encode()
        except BaseException as error:
            reply = described(error)
        answer(write, reply)
    sys.stdout.flush()
    os._exit(0)


def called_plainly(called: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    return encode(called(*map(decode, arguments), **{name: decode(each) for name, each in keywords.items()}))


def find(module: ModuleType, function: str) -> Any:
    """The function, or the method of that name of a class `Solution`."""
    found = getattr(module, function, None)
    solution = getattr(module, "Solution", None)
    if found is None and solution is not None:
        found = getattr(solution(), function, None)
    if not callable(found):
        raise NameError(f"the program defines no function {function!r}")
    return found


def described(error: BaseException) -> bytes:
    return json.dumps({"error": text_of(error), "memory": isinstance(error, MemoryError)}).encode()


def text_of(error: BaseException) -> str:
    """An exception of a class of its own has the name of the built-in class above it, which tests catch."""
    try:
        kinds = type(error).__mro__
        kind = next((one for one in kinds if one.__module__ == "builtins"), kinds[0])
        name = kinds[0] if kind in (Exception, BaseException) else kind
        return f"{name.__name__}: {error}"[:300]
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
