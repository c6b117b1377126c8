"""One attempt to get out of the sandbox, or to get a reward for nothing."""

from __future__ import annotations

from dataclasses import dataclass

PRELUDE = """
import ctypes, errno, mmap, os, platform, signal, socket, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def call(x86_64, aarch64, *arguments):
    number = x86_64 if platform.machine() == "x86_64" else aarch64
    words = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    result = libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return True
"""


@dataclass(frozen=True)
class Attempt:
    """`body` is that of `attempt(facts)`: it returns True if it got out. `facts` name things outside.

    `bare`: it does get out where there are only limits, which shows that the attempt is no blank shot.
    `forks`: the program may have 8 processes; only with namespaces. `waits`: only its wall time ends it.
    """

    name: str
    body: str
    bare: bool = False
    forks: bool = False
    waits: bool = False

    @property
    def code(self) -> str:
        lines = "".join(f"    {line}\n" for line in self.body.strip().splitlines())
        return f"{PRELUDE}\ndef attempt(facts):\n{lines}"


def attempts(table: str) -> list[Attempt]:
    """The attempts of a table: `## name [bare] [forks] [waits]`, and the body."""
    found = []
    for section in table.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        name, *marks = (part.strip() for part in title.replace("]", "").split("["))
        found.append(Attempt(name, body, "bare" in marks, "forks" in marks, "waits" in marks))
    return found
