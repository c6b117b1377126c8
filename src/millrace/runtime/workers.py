"""The workers of a runtime, whatever carries their messages: their epochs, how they begin and end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Generic

from millrace.core.errors import DeadlineExceeded, WorkerError
from millrace.core.placement import Place
from millrace.runtime.gang import GangHandle, M
from millrace.runtime.seam import late

CLOSE_TIMEOUT_S = 10.0


class Workers(Generic[M]):
    """Handles of one process each, or gangs of such. Epochs go on from the logs in `log_dir`."""

    def __init__(self, log_dir: Path | None) -> None:
        self._epochs = past_epochs(log_dir)  # of the newest incarnation, by `file_name`
        self._handles: set[M | GangHandle] = set()
        self.closed = False

    def check(self, name: str, ranks: int) -> None:
        """Raises: WorkerError: no worker can begin, or not one of so many ranks."""
        if self.closed:
            raise WorkerError(f"cannot spawn {name}: the runtime is closed")
        if ranks < 1:
            raise WorkerError(f"cannot spawn {name} with {ranks} ranks: a worker is at least one process")

    def make(self, name: str, ranks: int, member: Callable[[str, int], M]) -> M | GangHandle:
        """The handle of its next incarnation. `member` makes that of one process, from name and epoch."""
        epoch = self._epochs[file_name(name)] = self._epochs.get(file_name(name), 0) + 1
        handle: M | GangHandle
        if ranks == 1:
            handle = member(name, epoch)
        else:
            handle = GangHandle(name, epoch, [member(f"{name}.{rank}", epoch) for rank in range(ranks)])
        self._handles.add(handle)
        handle.dead.add_done_callback(lambda _: self._handles.discard(handle))
        return handle

    async def start(
        self,
        handle: M | GangHandle,
        place: Place,
        begin: Callable[[M, Place], Awaitable[None]],
        *,
        target: str,
        timeout_s: float,
    ) -> None:
        """Begin each of its processes. One that fails leaves none behind. Raises: DeadlineExceeded, and what
        `begin` raises."""
        try:
            async with asyncio.timeout(timeout_s) as limit:
                if isinstance(handle, GangHandle):
                    await handle.start(place, begin)
                else:
                    await begin(handle, place)
        except BaseException as error:
            await handle.end()
            if isinstance(error, TimeoutError) and limit.expired():
                raise late(handle.name, handle.epoch, target, timeout_s) from None
            raise

    def dump_stacks(self) -> None:
        """Have every worker write its stacks into its log."""
        for handle in self._handles:
            handle.dump_stacks()

    def each(self) -> list[M]:
        """Every process."""
        gangs = [one.members if isinstance(one, GangHandle) else [one] for one in self._handles]
        return [member for members in gangs for member in members]

    def kill(self) -> None:
        """All of them; no other begins."""
        self.closed = True
        for handle in list(self._handles):
            handle.kill()

    async def gone(self) -> None:
        """Wait until none is left. Raises: DeadlineExceeded, naming those that live on."""
        if handles := list(self._handles):
            await asyncio.wait([handle.dead for handle in handles], timeout=CLOSE_TIMEOUT_S)
        if left := [f"{handle.name} (epoch {handle.epoch})" for handle in handles if not handle.dead.done()]:
            raise DeadlineExceeded(f"{', '.join(left)}: alive {CLOSE_TIMEOUT_S:g} s after they were killed")


def file_name(name: str) -> str:
    return name.replace("/", "_")


def past_epochs(log_dir: Path | None) -> dict[str, int]:
    """The newest epoch of every worker that has a log there, of however many ranks it was."""
    epochs: dict[str, int] = {}
    for path in log_dir.glob("*.*.log") if log_dir is not None else ():
        name, _, epoch = path.name.removesuffix(".log").rpartition(".")
        worker, _, rank = name.rpartition(".")
        for one in (name, worker) if rank.isdecimal() else (name,):
            if epoch.isdecimal():
                epochs[one] = max(epochs.get(one, 0), int(epoch))
    return epochs
