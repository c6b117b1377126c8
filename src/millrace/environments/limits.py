"""A bound on this process's memory, so that a reward that allocates without end fails by itself.

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
    processes start with the same limit. What modules take that are imported from now on does not count: an
    extension module that cannot have its memory ends its process.
    """
    _set_limit(_used_bytes() + extra_mb * 2**20)
    builtins.__import__ = _Uncounted(builtins.__import__)


class _Uncounted:
    """`__import__`, with the limit lifted while modules are loaded, and raised by what that took.

    Threads load side by side. Each module has a lock of its own, and with one around all of them two threads
    could wait for each other.
    """

    def __init__(self, load: _Import) -> None:
        self._load, self._lock, self._loading = load, threading.RLock(), 0
        self._limit = self._before = 0  # bytes, before the first of those that load now

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
    """A relative import is looked at by the module that makes it, which is being loaded."""
    module = sys.modules.get(name)
    return level == 0 and module is not None and all(hasattr(module, part) for part in fromlist or ())


def _used_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData:"))


def _set_limit(limit: int) -> None:
    """As far as the hard limit allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = hard if limit == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
