"""On which sockets processes listen, so that others can connect."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_NET = Path("/proc/net")
_TCP_LISTEN = "0A"
_UNIX_ACCEPTS = 0x10000  # __SO_ACCEPTCON


def listening(pids: Iterable[int]) -> set[str]:
    """The listening sockets of these processes, in words: "tcp port 8080", "unix /run/x". A process that we
    may not look at has none."""
    names = dict(_listening())
    return {names[link] for pid in pids for link in _open_files(pid) if link in names}


def _listening() -> Iterator[tuple[str, str]]:
    """(its link in /proc/PID/fd, its description) of every listening socket of this network namespace."""
    for table in ("tcp", "tcp6"):
        for fields in _lines(table):
            if fields[3] == _TCP_LISTEN:
                yield f"socket:[{fields[9]}]", f"tcp port {int(fields[1].rpartition(':')[2], 16)}"
    for fields in _lines("unix"):
        if int(fields[3], 16) & _UNIX_ACCEPTS:
            yield f"socket:[{fields[6]}]", f"unix {fields[7] if len(fields) > 7 else 'without a name'}"


def _lines(table: str) -> list[list[str]]:
    try:
        return [line.split() for line in (_NET / table).read_text().splitlines()[1:]]
    except OSError:  # no IPv6, say
        return []


def _open_files(pid: int) -> Iterator[str]:
    with suppress(OSError):  # it has ended
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # closed meanwhile
                yield os.readlink(f"/proc/{pid}/fd/{fd}")
