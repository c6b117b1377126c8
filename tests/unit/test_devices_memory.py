"""Pages and pieces of large memory, in threads."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from millrace.core.progress import CallProgress, count, of
from millrace.devices import large_memory
from millrace.devices.large_memory import Bytes, allocate, each, enter

NUM_BYTES = 4 << 20


@pytest.fixture
def fd() -> Iterator[int]:
    made = os.memfd_create("pages")
    os.truncate(made, NUM_BYTES)
    yield made
    os.close(made)


@pytest.fixture
def memory(fd: int, monkeypatch: pytest.MonkeyPatch) -> Bytes:
    monkeypatch.setattr(large_memory, "STEP_BYTES", 1 << 20)
    return np.frombuffer(mmap.mmap(fd, 0), np.uint8)


def allocated_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


@pytest.mark.parametrize("advice", [large_memory.MADV_POPULATE_WRITE, 99], ids=["advised", "an older kernel"])
def test_every_page_is_allocated_and_counted(
    fd: int, memory: Bytes, advice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_memory, "MADV_POPULATE_WRITE", advice)
    with of(CallProgress("open")) as progress:
        allocate(memory)
    assert allocated_bytes(fd) == NUM_BYTES and progress.vitals().done == NUM_BYTES
    assert not memory.any()


@pytest.mark.parametrize("advice", [large_memory.MADV_POPULATE_READ, 99], ids=["advised", "an older kernel"])
def test_to_enter_pages_changes_nothing_in_them(
    memory: Bytes, advice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_memory, "MADV_POPULATE_READ", advice)
    memory[:] = 7
    enter(memory)
    assert (memory == 7).all()


def test_memory_that_the_kernel_refuses_is_an_error(memory: Bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*advice: object) -> int:
        ctypes.set_errno(errno.ENOMEM)
        return -1

    monkeypatch.setattr(large_memory, "_libc", SimpleNamespace(madvise=refuse))
    with pytest.raises(OSError, match=f"{1 << 20} bytes of memory cannot be had"):
        allocate(memory)


def test_each_keeps_the_order_and_counts_for_the_call_in_every_thread() -> None:
    met = threading.Barrier(3)

    def square(number: int) -> int:
        met.wait(60.0)  # three threads at the same time
        count()
        return number * number

    with of(CallProgress("pull")) as progress:
        assert each(square, range(9), threads_min=3) == [number * number for number in range(9)]
    assert progress.vitals().done == 9


def test_each_takes_no_item_after_an_error_and_raises_it() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(1000):
            taken.append(number)
            yield number

    def fail(number: int) -> None:
        raise ZeroDivisionError(number)

    with pytest.raises(ZeroDivisionError):
        each(fail, items(), threads_min=2)
    assert len(taken) < 10


@pytest.mark.parametrize(
    ("cores", "computes", "threads"), [(2, "1", 1), (2, "2", 2), (8, "1", 2), (256, "1", 16)]
)
def test_a_piece_of_work_has_a_quarter_of_the_cores(
    cores: int, computes: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("OMP_NUM_THREADS", computes)
    assert large_memory.num_threads() == threads
