"""Processes that share simulations."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

from millrace.runtime.process import die_with_parent, killing_on_error

TASKS_PER_PROCESS = 10_000
"""After which a process is replaced. (Giving this number also makes the pool spawn them, and not fork.)"""


@contextmanager
def process_pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """`jobs` processes that end when this one does, killed or not: by themselves they would wait for ever.

    An exception in the body ends them at once. A script that asks for processes needs an
    `if __name__ == "__main__"`.
    """
    pool = ProcessPoolExecutor(
        jobs,
        initializer=_begin,
        initargs=(os.getpid(),),
        max_tasks_per_child=TASKS_PER_PROCESS,
    )
    try:
        with killing_on_error():
            yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(parent_pid: int) -> None:
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent decides what it means
