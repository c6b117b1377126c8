"""Rewards that misbehave for about one completion in eight, and score the others.

`millrace chaos --hostile` names a reward in `reward.path`, as a user does.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any

ONE_IN = 8


def holds(completion: str, answer: str) -> float:
    """A regular expression that backtracks: the interpreter does nothing else."""
    if _hit(completion):
        re.match(r"(a+)+$", "a" * 60 + "b")
    return _share(completion, answer)


def sleeps(completion: str, answer: str) -> float:
    if _hit(completion):
        time.sleep(3600)
    return _share(completion, answer)


def allocates(completion: str, answer: str) -> float:
    if _hit(completion):
        _ = [bytearray(1 << 28) for _ in range(400)]
    return _share(completion, answer)


def prints(completion: str, answer: str) -> float:
    """Prints control characters of a terminal without end."""
    while _hit(completion):
        sys.stdout.write("\x1b[2J\x1b]0;owned\x07\n" * 100)
    return _share(completion, answer)


def raises(completion: str, answer: str) -> float:
    if _hit(completion):
        raise RuntimeError("\x1b[31m" + completion)
    return _share(completion, answer)


def exits(completion: str, answer: str) -> float:
    if _hit(completion):
        os._exit(3)
    return _share(completion, answer)


def crashes(completion: str, answer: str) -> float:
    if _hit(completion):
        ctypes.string_at(0)
    return _share(completion, answer)


def recurses(completion: str, answer: str) -> float:
    return recurses(completion, answer) if _hit(completion) else _share(completion, answer)


def rubbish(completion: str, answer: str) -> Any:
    """Returns a value that is no finite number."""
    odd: tuple[Any, ...] = (
        float("nan"),
        float("inf"),
        "1.0",
        [1.0],
        {},
        {"reward": "x"},
        object(),
        10**400,
        b"1",
        ...,
    )
    return odd[zlib.crc32(completion.encode()) // ONE_IN % len(odd)] if _hit(completion) else 0.5


def closes(completion: str, answer: str) -> float:
    """Closes every file descriptor of its process."""
    if _hit(completion):
        os.closerange(0, 1024)
    return _share(completion, answer)


def leaves(completion: str, answer: str) -> float:
    if _hit(completion):
        sys.exit("enough")
    return _share(completion, answer)


HOSTILE: tuple[Callable[..., Any], ...] = (
    holds,
    sleeps,
    allocates,
    prints,
    raises,
    exits,
    crashes,
    recurses,
    rubbish,
    closes,
    leaves,
)


def _hit(completion: str) -> bool:
    return zlib.crc32(completion.encode()) % ONE_IN == 0


def _share(completion: str, answer: str) -> float:
    return sum(a == b for a, b in zip(completion, answer, strict=False)) / max(1, len(answer))
