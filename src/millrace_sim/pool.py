"""Processes that share simulations."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from millrace.runtime.process import (
    SPAWN,
    deferring_interrupts,
    die_with_parent,
    killing_on_error,
    leave_signals,
)

T = TypeVar("T")


@contextmanager
def process_pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """`jobs` processes that end when this one does, killed or not: by themselves they would wait for ever.

    An exception in the body ends them at once. A script that asks for processes needs an
    `if __name__ == "__main__"`.
    """
    pool = _Pool(jobs, SPAWN, _begin, (os.getpid(),))
    try:
        with killing_on_error():
            yield pool
    finally:
        pool.shutdown(cancel_futures=True)


class _Pool(ProcessPoolExecutor):
    def submit(self, function: Callable[..., T], /, *args: Any, **keywords: Any) -> Future[T]:
        """An interrupt between two instructions here would leave a lock of the pool locked. Then its end
        would wait for ever."""
        with deferring_interrupts():
            return super().submit(function, *args, **keywords)


def _begin(parent_pid: int) -> None:
    die_with_parent(parent_pid)
    leave_signals()  # Ctrl-C reaches all; the parent decides what it means
