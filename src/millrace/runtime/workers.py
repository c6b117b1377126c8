"""The workers of any runtime: their epochs, how they begin and end."""

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
    """Handles of workers: one process each, or a gang. Epochs go on from the logs in `log_dir`."""

    def __init__(self, log_dir: Path | None) -> None:
        self._epochs = newest_epochs(log_dir)  # of the newest incarnation, by `file_name`
        self._handles: set[M | GangHandle] = set()
        self.closed = False

    def check(self, name: str, ranks: int) -> None:
        """Raises: WorkerError: no worker can begin, or none with this number of ranks."""
        if self.closed:
            raise WorkerError(f"cannot spawn {name}: the runtime is closed")
        if ranks < 1:
            raise WorkerError(f"cannot spawn {name} with {ranks} ranks: a worker is at least one process")

    def make(self, name: str, ranks: int, member: Callable[[str, int], M]) -> M | GangHandle:
        """The handle of the worker's next incarnation. `member` makes the handle of one process."""
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
        """Begin each process of the worker. If one fails, all end. Raises: DeadlineExceeded, and what `begin`
        raises."""
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
        gangs = [handle.members if isinstance(handle, GangHandle) else [handle] for handle in self._handles]
        return [member for members in gangs for member in members]

    def kill(self) -> None:
        """Kill all workers; no other worker can begin."""
        self.closed = True
        for handle in list(self._handles):
            handle.kill()

    async def gone(self) -> None:
        """Wait until no worker lives. Raises: DeadlineExceeded, naming those that live on."""
        if handles := list(self._handles):
            await asyncio.wait([handle.dead for handle in handles], timeout=CLOSE_TIMEOUT_S)
        if alive := [f"{handle.name} (epoch {handle.epoch})" for handle in handles if not handle.dead.done()]:
            raise DeadlineExceeded(f"{', '.join(alive)}: alive {CLOSE_TIMEOUT_S:g} s after they were killed")


def file_name(name: str) -> str:
    return name.replace("/", "_")


def newest_epochs(log_dir: Path | None) -> dict[str, int]:
    """The newest epoch of every worker that has a log there, whatever its number of ranks."""
    epochs: dict[str, int] = {}
    for path in log_dir.glob("*.*.log") if log_dir is not None else ():
        name, _, epoch = path.name.removesuffix(".log").rpartition(".")
        worker, _, rank = name.rpartition(".")
        for stem in (name, worker) if rank.isdecimal() else (name,):
            if epoch.isdecimal():
                epochs[stem] = max(epochs.get(stem, 0), int(epoch))
    return epochs
