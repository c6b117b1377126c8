"""What workers need of the kernel. Asked before anything begins, where it would else end in the middle."""

from __future__ import annotations

import os
import platform
import signal
from pathlib import Path
from types import ModuleType

from millrace.core.errors import WorkerError

NEEDED: tuple[tuple[ModuleType, str], ...] = (
    (os, "pidfd_open"),  # a worker's end is seen at once, and a signal never meets another process
    (signal, "pidfd_send_signal"),
    (os, "memfd_create"),  # published weights are in memory that has no file
    (os, "sched_getaffinity"),
)
PROC = Path("/proc/self/stat")


def check_kernel() -> None:
    """Raises: WorkerError: no worker can run on this host, and what works there all the same."""
    missing = [name for module, name in NEEDED if not hasattr(module, name)]
    if not PROC.exists():
        missing.append("/proc")
    if missing:
        raise WorkerError(
            f"worker processes need Linux 5.3 or newer. This is {platform.system()} {platform.release()}, "
            f"without {', '.join(missing)}.\n"
            "  Run it in a container or a virtual machine with Linux (docs/installing.md). What needs\n"
            "  no worker works: show, doctor, ui, report, compare, trace, export, simulate, plan, sft, fetch"
        )
