"""Large memory, block by block: work on many blocks in threads, because copies, digests and page faults
release Python's lock; and pages that are allocated, or entered into this process's page table, before
anybody waits for one, or given back to the kernel.

To write a fresh page takes ten times as long as a copy. The kernel fills many pages at once (`madvise`, Linux
5.14) faster than one after another as they are written to, and in several threads.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from threading import Lock
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from millrace.core.progress import count
from millrace.devices.inventory import environment_threads

Bytes = NDArray[np.uint8]

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


# ---------------------------------------------------------------- pages


MADV_DONTNEED, MADV_POPULATE_READ, MADV_POPULATE_WRITE = 4, 22, 23
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX, KEPT_BYTES_MAX = -1, -3, -8, 2**31 - 1
STEP_BYTES = 64 << 20  # at a time: a count of progress each

_libc = ctypes.CDLL(None, use_errno=True)


def allocate(memory: Bytes) -> None:
    """Allocate every page of `memory`, which begins at a page and holds nothing yet.

    Raises: OSError: there is no such memory.
    """
    _populate(memory, MADV_POPULATE_WRITE, lambda part: part.fill(0))


def enter(memory: Bytes) -> None:
    """Enter every page of `memory`, which begins at a page, into the page table of this process. Raises:
    OSError."""
    _populate(memory, MADV_POPULATE_READ, lambda part: part[:: mmap.PAGESIZE].max(initial=0))


def give_back(memory: Bytes) -> None:
    """Give the pages of `memory` back to the kernel. `memory` is private, and begins and ends at a page. It
    stays allocated, and every byte of it is 0."""
    _advise(memory, MADV_DONTNEED)


def keep_freed() -> None:
    """From now on the allocator keeps all memory that it is given back, until `trim`. A step of the trainer
    allocates as the step before did, and fresh pages cost up to a tenth of its time. New threads share one
    arena, so none of them keeps what another one could use."""
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(M_ARENA_MAX, 1)
        _libc.mallopt(M_MMAP_THRESHOLD, KEPT_BYTES_MAX)
        _libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES_MAX)


def trim() -> None:
    """Give the kernel what the allocator keeps for later."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def _populate(memory: Bytes, advice: int, by_hand: Callable[[Bytes], object]) -> None:
    def populate(start: int) -> None:
        part = memory[start : start + STEP_BYTES]
        if not _advise(part, advice):
            by_hand(part)
        count(len(part))

    each(populate, range(0, len(memory), STEP_BYTES))


def _advise(memory: Bytes, advice: int) -> bool:
    """Whether the kernel knows this advice."""
    if _libc.madvise(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(len(memory)), advice) == 0:
        return True
    code = ctypes.get_errno()
    if code != errno.EINVAL:
        raise OSError(code, f"{len(memory)} bytes of memory cannot be had: {os.strerror(code)}")
    return False
