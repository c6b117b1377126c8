"""What workers need of the kernel and of this process. A run checks it first: it would fail in the middle."""

from __future__ import annotations

import os
import platform
import resource
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

FILES_A_WORKER = 2
"""Open files of the controller for each worker: its socket and its pidfd."""
FILES_BESIDE = 256
"""For all else: the ledger, logs, forks under way, modules that are being imported."""
FILES = 65_536
"""The soft limit, if the hard limit allows it. A hard limit can be a billion, and some programs try to close
every number up to the soft limit."""


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


def allow_open_files(num_workers: int) -> None:
    """Raise this process's soft limit on open files, so that it can watch `num_workers` local workers.

    Raises: WorkerError: its hard limit is too low, and only the user can raise that.
    """
    needed = FILES_A_WORKER * num_workers + FILES_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise WorkerError(
            f"{num_workers} local workers need {needed} open files of the controller, and its hard limit is "
            f"{hard}.\n"
            "  Raise it (`LimitNOFILE=` of systemd, `--ulimit nofile=` of a container, `ulimit -n` as root), "
            "or lower `rollout.replicas`"
        )
    limit = max(FILES, needed) if hard == resource.RLIM_INFINITY else min(hard, max(FILES, needed))
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
