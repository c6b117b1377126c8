"""What the replica is told of the first rank that ended. See `ranks`.

The rank may be a child of vLLM's own process. Then the kernel tells only that process how the rank ended. So
the executor writes a line into memory of the replica, which outlives the executor.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

from millrace.core.errors import WorkerError

RANK_END = "MILLRACE_RANK_END"
"""The path of that memory in the environment, which vLLM's processes inherit."""
_BYTES_MAX = 1024
_ENDED_S = 5.0


class RankEnd:
    """Made before the executor. If vLLM has no ranks, none ever ends."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("rank end")
        os.environ[RANK_END] = f"/proc/{os.getpid()}/fd/{self._fd}"

    def line(self) -> str:
        """Which rank has ended, and how. Empty: none has."""
        return os.pread(self._fd, _BYTES_MAX, 0).decode() if self._fd >= 0 else ""

    def check(self) -> None:
        """Raises: WorkerError: a rank has ended."""
        if line := self.line():
            raise WorkerError(line)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """A call of the ranks in this block raises WorkerError if it fails because a rank has ended."""
        try:
            yield
        except Exception as error:
            if line := self.line():
                raise WorkerError(line) from error
            raise

    def close(self) -> None:
        """A second call changes nothing."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def end_of(process: BaseProcess) -> str:
    """Which process of vLLM has ended, and how. Waits for its exit code, for `_ENDED_S` at most."""
    process.join(_ENDED_S)
    code = process.exitcode
    ended = f"vLLM's process {process.name} (pid {process.pid})"
    if code is None or code >= 0:
        return f"{ended} exited with code {code}"
    return f"{ended} was killed by signal {-code} ({signal.Signals(-code).name})"
