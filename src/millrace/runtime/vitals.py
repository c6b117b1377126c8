"""What a process says of itself with every heartbeat: whether it computes or waits for a disk, which calls it
executes, and how large it is."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from millrace.core.types import Vitals

_TASKS = Path("/proc/self/task")
_STATM = Path("/proc/self/statm")
_UNINTERRUPTIBLE = "D"


class VitalSigns:
    """Of this process. Cheap: one system call, and one small file per thread."""

    def __init__(self) -> None:
        self._read = 0

    def take(self, calls: Iterable[str], *, receiving: bool) -> Vitals:
        """`calls` are the methods that are being executed; `receiving`: another is on its way."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        # A page fault that needs a disk is how a mapped file is read, from a network too.
        read, before = usage.ru_inblock + usage.ru_majflt, self._read
        self._read = read
        return Vitals(
            cpu_s=usage.ru_utime + usage.ru_stime,
            resident_bytes=int(_STATM.read_text().split()[1]) * resource.getpagesize(),
            disk=read > before or _waits_for_disk(),
            calls=sorted(calls),
            receiving=receiving,
        )


def _waits_for_disk() -> bool:
    """Whether a thread is in a wait that no signal interrupts: for a write to be on disk, say."""
    for thread in os.listdir(_TASKS):
        with suppress(OSError):  # ended meanwhile
            state = (_TASKS / thread / "stat").read_text().rpartition(")")[2].split()[0]
            if state == _UNINTERRUPTIBLE:
                return True
    return False
