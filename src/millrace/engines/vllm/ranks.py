"""The processes of one engine where each device has its own, a rank. They end together.

A rank waits for the others in every layer, and spins all the while. So one that is left alone would spin for
ever, and its step would not end. Here a thread waits for the first end, and kills the others.
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

# vLLM sees that all have ended within a tenth of a second, and gives up the step.
_TOLD_S = 5.0
SHARED = Path("/dev/shm")


class EngineRanks:
    """Of vLLM's `executor`. Where vLLM computes in this process, none: then nothing here does anything."""

    def __init__(self, executor: Any) -> None:
        self._executor, self._lost = executor, ""
        self._processes = [rank.proc for rank in getattr(executor, "workers", ())]
        self._watch = Thread(target=self._end_together, daemon=True, name="vllm-ranks")
        if self._processes:
            _unlink_shared_memory(process.pid for process in self._processes)
            executor.rpc_broadcast_mq.buffer.is_creator = False  # it would unlink its memory once more
            self._watch.start()

    def check(self) -> None:
        """Raises: WorkerError: one has ended, and how."""
        if self._lost:
            raise WorkerError(self._lost)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """What is asked of them in this block raises WorkerError if it fails because one has ended."""
        try:
            yield
        except Exception as error:
            if getattr(self._executor, "is_failed", False):
                self._watch.join(_TOLD_S)
            if self._lost:
                raise WorkerError(self._lost) from error
            raise

    def _end_together(self) -> None:
        ended = connection.wait([process.sentinel for process in self._processes])
        first = next(process for process in self._processes if process.sentinel in ended)
        first.join(_TOLD_S)
        self._lost = f"vLLM's process {first.name} (pid {first.pid}) {_how(first.exitcode)}"
        for process in self._processes:
            process.kill()


def _how(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exited with code {code}"
    return f"was killed by signal {-code} ({signal.Signals(-code).name})"


def _unlink_shared_memory(pids: Iterable[int]) -> None:
    """Every process has mapped all of it by now. Files without a name are gone with their processes, however
    these end."""
    for pid in pids:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            mapped = Path(line.split(maxsplit=5)[-1])
            if mapped.parent == SHARED:
                mapped.unlink(missing_ok=True)
