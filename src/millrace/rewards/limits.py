"""Bounds the memory of a process, so that a reward that allocates without end fails alone.

A control group needs rights that a run may not have, and kills the process instead of failing one reward.
"""

from __future__ import annotations

import builtins
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_Import = Callable[..., Any]


def limit_process_memory(extra_mb: int) -> None:
    """Let this process's private memory grow by `extra_mb` MiB from now on; more raises MemoryError.

    The limit (RLIMIT_DATA) counts private writable memory, not mapped files or shared weights. Child
    processes start with the same limit. Memory of later imports does not count, because an extension module
    that gets no memory ends its process.
    """
    _set_limit(_used_bytes() + extra_mb * 2**20)
    builtins.__import__ = _Uncounted(builtins.__import__)


def permit_open_files() -> None:
    """Let this process have as many open files as the system permits."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Uncounted:
    """`__import__` without the limit while modules are loaded. The limit then grows by the memory of the
    modules.

    Threads load modules at the same time. Each module has its own lock. With one lock around all of them, two
    threads could wait for each other.
    """

    def __init__(self, load: _Import) -> None:
        self._load, self._lock, self._loading = load, threading.RLock(), 0
        self._limit = self._before = 0  # bytes, before the first of the present imports

    def __call__(
        self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        if _is_loaded(name, fromlist, level):
            return self._load(name, globals, locals, fromlist, level)
        self._begin()
        try:
            return self._load(name, globals, locals, fromlist, level)
        finally:
            self._end()

    def _begin(self) -> None:
        with self._lock:
            if self._loading == 0:
                self._limit, self._before = resource.getrlimit(resource.RLIMIT_DATA)[0], _used_bytes()
            self._loading += 1
            _set_limit(resource.RLIM_INFINITY)

    def _end(self) -> None:
        with self._lock:
            self._loading -= 1
            if self._loading == 0:
                _set_limit(self._limit + max(0, _used_bytes() - self._before))


def _is_loaded(name: str, fromlist: Any, level: int) -> bool:
    """Whether an import needs no loading. A relative import comes from a module that is being loaded."""
    module = sys.modules.get(name)
    return level == 0 and module is not None and all(hasattr(module, one) for one in fromlist or ())


def _used_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData:"))


def _set_limit(limit: int) -> None:
    """Set the limit, as far as the hard limit permits."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = hard if limit == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
