"""The processes of one engine with several devices: one rank for each. The ranks end together.

A rank waits for the other ranks in every layer, and spins all the while. So a rank that is left alone would
spin for ever, and its step would not end. A thread waits for the first end, and kills the other ranks.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from threading import Thread
from typing import Any

from millrace.core.errors import WorkerError

# vLLM sees within a tenth of a second that all ranks have ended, and gives up the step.
_ENDED_S = 5.0
SHARED = Path("/dev/shm")


class EngineRanks:
    """The ranks of vLLM's `executor`. If vLLM computes in this process there are no ranks, and every method
    does nothing."""

    def __init__(self, executor: Any) -> None:
        self._executor, self._end = executor, ""
        self._processes = [rank.proc for rank in getattr(executor, "workers", ())]
        self._watch = Thread(target=self._end_together, daemon=True, name="vllm-ranks")
        if self._processes:
            _unlink_shared_memory(process.pid for process in self._processes)
            executor.rpc_broadcast_mq.buffer.is_creator = False  # vLLM would unlink the memory once more
            self._watch.start()

    def check(self) -> None:
        """Raises: WorkerError: a rank has ended; the message says how."""
        if self._end:
            raise WorkerError(self._end)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """A call of the ranks in this block raises WorkerError if it fails because a rank has ended."""
        try:
            yield
        except Exception as error:
            if getattr(self._executor, "is_failed", False):
                self._watch.join(_ENDED_S)
            if self._end:
                raise WorkerError(self._end) from error
            raise

    def _end_together(self) -> None:
        ended = connection.wait([process.sentinel for process in self._processes])
        first = next(process for process in self._processes if process.sentinel in ended)
        first.join(_ENDED_S)
        self._end = f"vLLM's process {first.name} (pid {first.pid}) {how_it_ended(first.exitcode)}"
        for process in self._processes:
            process.kill()


def how_it_ended(code: int | None) -> str:
    """The end of a process, by its exit code."""
    if code is None or code >= 0:
        return f"exited with code {code}"
    return f"was killed by signal {-code} ({signal.Signals(-code).name})"


def _unlink_shared_memory(pids: Iterable[int]) -> None:
    """Unlink the files of shared memory, which every process has mapped by now. Files without a name are gone
    when their processes end."""
    for pid in pids:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            mapped = Path(line.split(maxsplit=5)[-1])
            if mapped.parent == SHARED:
                mapped.unlink(missing_ok=True)
