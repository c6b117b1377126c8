"""What a process reports with every heartbeat: whether it computes or waits for a core or a disk, how far
its calls are, and how large it is.

Its descendants count too: an engine may compute in processes of its own. A worker whose child works is not
stuck.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import NamedTuple

from millrace.core.progress import CallVitals, Vitals
from millrace.runtime import process

_UNINTERRUPTIBLE = "D"
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = resource.getpagesize()


class _Used(NamedTuple):
    """By a descendant, and by those of the descendant's children that it has waited for."""

    cpu_s: float
    faults: int
    resident_bytes: int


class VitalSigns:
    """Of this process and its descendants. Without children it takes two system calls, and two small files
    for each thread; with children, a small file for each process of the host too."""

    def __init__(self) -> None:
        self._read = 0

    def take(self, calls: list[CallVitals], *, receiving: bool) -> Vitals:
        """`calls` are those that are being executed. `receiving`: another call is arriving."""
        mine, ended = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        others = process.descendants(os.getpid()) if process.has_children() else []
        used = [usage for pid in others if (usage := _used(pid)) is not None]
        # A page fault that needs a disk is how a mapped file is read, from a network too.
        read = sum(rusage.ru_inblock + rusage.ru_majflt for rusage in (mine, ended))
        read, before = read + sum(usage.faults for usage in used), self._read
        self._read = read
        return Vitals(
            cpu_s=sum(rusage.ru_utime + rusage.ru_stime for rusage in (mine, ended))
            + sum(usage.cpu_s for usage in used),
            resident_bytes=_resident_bytes() + sum(usage.resident_bytes for usage in used),
            disk=read > before or any(_waits_for_disk(pid) for pid in (os.getpid(), *others)),
            calls=calls,
            receiving=receiving,
            queued_s=sum(process.queued_s(pid) for pid in (os.getpid(), *others)),
        )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def _used(pid: int) -> _Used | None:
    """None: it has ended meanwhile, and its parent counts it."""
    if not (fields := process.stat_fields(pid)):
        return None
    faults, cpu_ticks = (sum(map(int, fields[i:j])) for i, j in ((9, 11), (11, 15)))
    return _Used(cpu_ticks / _TICKS, faults, int(fields[21]) * _PAGE)


def _waits_for_disk(pid: int) -> bool:
    """Whether a thread is in a wait that no signal interrupts: for a write to be on disk, say."""
    states = (process.stat_fields(f"{pid}/task/{thread}")[:1] for thread in process.threads(pid))
    return [_UNINTERRUPTIBLE] in states
