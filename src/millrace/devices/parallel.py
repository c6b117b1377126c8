"""Work on many blocks of memory in threads: copies, digests and page faults release Python's lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from threading import Lock
from typing import TypeVar

from millrace.devices.inventory import environment_threads

T = TypeVar("T")
R = TypeVar("R")

CORES_A_THREAD = 4  # other workers of the host compute, copy and digest too
THREADS_MAX = 16  # so many saturate the memory of a host


def num_threads() -> int:
    """For one piece of work of this process: a quarter of its cores, or as many as it computes with, if the
    placement or the user gives it more."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(max(cores // CORES_A_THREAD, environment_threads() or 1), cores, THREADS_MAX))


def each(function: Callable[[T], R], items: Iterable[T], *, threads_min: int = 1) -> list[R]:
    """`list(map(function, items))`, in threads. The calling thread is one of them. Each item is taken when a
    thread is free for it, so lazy items are not all made at once.

    `function` counts progress for the call of the calling thread, and does not call `each`.
    Raises: the first error; no item is taken after it.
    """
    results, source, lock = dict[int, R](), enumerate(items), Lock()

    def take() -> tuple[int, T] | None:
        with lock:
            return next(source, None)

    def work() -> None:
        nonlocal source
        try:
            while (taken := take()) is not None:
                results[taken[0]] = function(taken[1])
        except BaseException:
            with lock:
                source = enumerate(())
            raise

    others = [_pool().submit(copy_context().run, work) for _ in range(max(num_threads(), threads_min) - 1)]
    try:
        work()
    finally:
        failures = [other.exception() for other in others]
    for failure in filter(None, failures):
        raise failure
    return [results[index] for index in range(len(results))]


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="blocks")
