"""A bound on this process's memory, so that a reward that allocates without end fails by itself."""

from __future__ import annotations

import resource
from pathlib import Path


def limit_process_memory(extra_mb: int) -> None:
    """Let this process's private memory grow by `extra_mb` MiB from now on; more raises MemoryError.

    Call it when everything is imported. The limit (RLIMIT_DATA) counts private writable memory, not
    mapped files or shared weights. Child processes start with the same limit.
    """
    status = Path("/proc/self/status").read_text()
    used_kb = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData:"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = used_kb * 1024 + extra_mb * 2**20
    resource.setrlimit(
        resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard)
    )
