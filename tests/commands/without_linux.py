"""`millrace` as on a kernel without what only Linux has: `python without_linux.py < COMMANDS`.

A line of stdin is a command, as [directory, words]. A line of stdout is what became of it, as
[exit code, standard error].

It stands for macOS as far as Linux can: the names are gone from `os`, `signal` and `socket`, nothing in
`/proc` and `/sys` is found, and libc has no `prctl`.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import io
import json
import os
import signal
import socket
import sys
from typing import Any

GONE = {
    os: ("pidfd_open", "memfd_create", "sched_getaffinity", "sched_setaffinity", "fdatasync", "waitid"),
    signal: ("pidfd_send_signal",),
    socket: ("SOCK_SEQPACKET",),
}
HIDDEN = ("/proc/", "/sys/", "/dev/shm")


def _refusing(call: Any) -> Any:
    def refuse(path: Any, *arguments: Any, **keywords: Any) -> Any:
        if isinstance(path, str | os.PathLike) and f"{os.fspath(path)}/".startswith(HIDDEN):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        return call(path, *arguments, **keywords)

    return refuse


class _Libc(ctypes.CDLL):
    def __getattr__(self, name: str) -> Any:
        if name == "prctl":
            raise AttributeError(name)
        return super().__getattr__(name)


def hide() -> None:
    for module, names in GONE.items():
        for name in names:
            delattr(module, name)
    builtins.open = io.open = _refusing(open)
    os.stat = _refusing(os.stat)
    os.open, os.listdir, os.readlink = _refusing(os.open), _refusing(os.listdir), _refusing(os.readlink)
    ctypes.CDLL = _Libc  # type: ignore[misc]


def outcome(directory: str, words: list[str]) -> tuple[int, str]:
    from millrace.cli.app import run

    os.chdir(directory)
    error = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
        code = run(words)
    return code, error.getvalue()


if __name__ == "__main__":
    hide()
    for line in sys.stdin:
        print(json.dumps(outcome(*json.loads(line))))
