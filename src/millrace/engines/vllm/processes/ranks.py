"""The processes of one engine with several devices: one rank for each. The ranks end together.

A rank waits for the other ranks in every layer, and spins all the while. So a rank that is left alone would
spin for ever, and its step would not end. A thread beside vLLM's executor waits for the first end, and kills
the other ranks. The executor is in the replica, or in a process of vLLM between the replica and the ranks.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable
from multiprocessing import connection
from pathlib import Path
from threading import Thread, current_thread, main_thread

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from millrace.engines.vllm.processes.rank_end import RANK_END, end_of

_PR_SET_PDEATHSIG = 1
SHARED = Path("/dev/shm")


class RankExecutor(MultiprocExecutor):
    """vLLM's executor for ranks, which tells the replica of the first rank that ends (`rank_end`)."""

    def _init_executor(self) -> None:
        self._rank_end = Path(os.environ[RANK_END])
        super()._init_executor()
        _unlink_shared_memory(rank.proc.pid for rank in self.workers)
        self.rpc_broadcast_mq.buffer.is_creator = False  # vLLM would unlink the memory once more
        if current_thread() is main_thread():  # PR_SET_PDEATHSIG is of the parent's thread
            self.collective_rpc(_die_with_parent)

    def start_worker_monitor(self, inline: bool = False) -> None:
        Thread(target=self._end_together, daemon=True, name="ranks").start()

    def _end_together(self) -> None:
        processes = [rank.proc for rank in self.workers]
        ended = connection.wait([process.sentinel for process in processes])
        if getattr(self, "shutting_down", False):
            return
        first = next(process for process in processes if process.sentinel in ended)
        end = end_of(first)
        for process in processes:
            process.kill()
        self._rank_end.write_text(end)
        super().start_worker_monitor(inline=True)  # gives up the step


def _die_with_parent(worker: object) -> None:
    """Ask the kernel for SIGKILL when the executor's process ends. Called in every rank."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _unlink_shared_memory(pids: Iterable[int]) -> None:
    """Unlink the files of shared memory, which every process has mapped by now. Files without a name are gone
    when their processes end."""
    for pid in pids:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            mapped = Path(line.split(maxsplit=5)[-1])
            if mapped.parent == SHARED:
                mapped.unlink(missing_ok=True)
