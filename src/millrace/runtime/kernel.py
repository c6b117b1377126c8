"""What workers need of the kernel. A run checks this first, because it would fail in the middle otherwise."""

from __future__ import annotations

import os
import platform
import signal
from pathlib import Path
from types import ModuleType

from millrace.core.errors import WorkerError

NEEDED: tuple[tuple[ModuleType, str], ...] = (
    (os, "pidfd_open"),  # the controller sees a worker's end at once, and a signal never hits another process
    (signal, "pidfd_send_signal"),
    (os, "memfd_create"),  # published weights are in memory without a file
    (os, "sched_getaffinity"),
)
PROC = Path("/proc/self/stat")


def check_kernel() -> None:
    """Raises: WorkerError: no worker can run on this host. The message names the commands that still work."""
    missing = [name for module, name in NEEDED if not hasattr(module, name)]
    if not PROC.exists():
        missing.append("/proc")
    if missing:
        raise WorkerError(
            f"worker processes need Linux 5.3 or newer. This is {platform.system()} {platform.release()}, "
            f"without {', '.join(missing)}.\n"
            "  Use a container or a virtual machine with Linux (docs/installing.md). These commands\n"
            "  work here: show, doctor, ui, report, compare, trace, export, simulate, plan, sft, fetch"
        )
