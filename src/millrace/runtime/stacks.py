"""Where a process is: the stacks of its threads and of its tasks, on demand.

A worker that gets the signal `DUMP_STACKS` writes its stacks into its log, and so do all processes of a run
whose controller gets it. The run goes on. C code writes the stacks of
threads, also while the worker is stuck in a call. The loop, if it still turns, writes the stacks of tasks.
"""

from __future__ import annotations

import asyncio
import faulthandler
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from millrace.core.ending_signals import STACKS

DUMP_STACKS = STACKS
"""The forkserver ignores this signal. A worker ignores it until the worker can answer."""


def answer_dumps() -> None:
    """Write to stderr on every `DUMP_STACKS` from now on. Call it on the running loop."""
    asyncio.get_running_loop().add_signal_handler(DUMP_STACKS, _dump_tasks, sys.stderr)
    faulthandler.register(DUMP_STACKS, all_threads=True, chain=True)


def survive_dumps() -> None:
    """Write the stacks of threads to stderr on every `DUMP_STACKS` from now on, which ends no process."""
    with suppress(AttributeError, OSError, RuntimeError, ValueError):  # stderr may be no file
        faulthandler.register(DUMP_STACKS, all_threads=True)


@contextmanager
def dumping(dump: Callable[[], None]) -> Iterator[None]:
    """In the block every `DUMP_STACKS` calls `dump` on the running loop."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(DUMP_STACKS, dump)
    try:
        yield
    finally:
        loop.remove_signal_handler(DUMP_STACKS)
        survive_dumps()


def dump_stacks(path: Path) -> None:
    """Append the stacks of this process to `path`. Call it on the running loop."""
    with path.open("a", encoding="utf-8") as file:
        file.write(f"\n==== {datetime.now(UTC).isoformat(timespec='seconds')}\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
        _dump_tasks(file)


def _dump_tasks(file: TextIO) -> None:
    for task in sorted(asyncio.all_tasks(), key=lambda task: task.get_name()):
        file.write(f"\n-- task {task.get_name()}\n")
        task.print_stack(file=file)
    file.flush()
