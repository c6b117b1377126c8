"""What a program may use."""

from __future__ import annotations

import resource
from dataclasses import asdict, dataclass
from typing import Any

MiB = 2**20


@dataclass(frozen=True)
class Limits:
    """Bounds of one program. `wall_s` covers all its calls.

    `disk_bytes` and `files` bound its private directory. `processes` above 1 permits fork and exec: they need
    the level "namespaces", as `threads` do. `output_bytes` bounds what the program prints, and apart from
    that what it returns.
    """

    cpu_s: float = 5.0
    wall_s: float = 8.0
    memory_bytes: int = 512 * MiB
    disk_bytes: int = 16 * MiB
    files: int = 256
    open_files: int = 64
    processes: int = 1
    threads: int = 16
    output_bytes: int = MiB

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def apply(limits: Limits, *, count_tasks: bool) -> None:
    """Bound this process and its children, for good.

    Args:
        count_tasks: bound processes and threads too. The kernel counts them per user and user namespace, so
            that this needs a namespace of the program's own. Two more are its warden and its first process.
    """
    seconds = max(1, round(limits.cpu_s))
    bounds = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: limits.memory_bytes,
        resource.RLIMIT_FSIZE: limits.disk_bytes,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 64,
        resource.RLIMIT_STACK: 64 * MiB,
    }
    if count_tasks:
        bounds[resource.RLIMIT_NPROC] = 1 + limits.processes + limits.threads
    for kind, most in bounds.items():
        hard = resource.getrlimit(kind)[1]
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (value, value))
