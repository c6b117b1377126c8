"""Messages between the controller and an actor: pickled values, and streams that the controller pulls.

`Items` has the items of a stream that the worker has yielded and the controller has not fetched. `Inbox` has
the fetched items that the consumer has not taken. The window bounds both together: a generator is at most
`STREAM_WINDOW` items ahead of its consumer.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from millrace.runtime.seam import STREAM_WINDOW


def packed(value: Any) -> bytes:
    """Raises what pickling raises."""
    return pickle.dumps(value, protocol=5)


def unpacked(payload: bytes) -> Any:
    """Raises what unpickling raises. Both ends belong to one run; docs/cluster.md says who else may write."""
    return pickle.loads(payload)


class Answer(msgspec.Struct, frozen=True):
    """The pickled result or error of a command, and how many items each open stream had yielded before."""

    ok: bool
    payload: bytes
    before: dict[int, int] = {}


class Items:
    """The worker's side of one stream. `task` runs the generator.

    Waits for: room (credits of the consumer). Unblocks: `take`, with each item and with the end.
    """

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.num_yielded = 0
        self._credit = asyncio.Semaphore(STREAM_WINDOW)
        self._news = asyncio.Event()
        self._yielded: list[Answer] = []
        self._complete = False

    async def room(self) -> None:
        await self._credit.acquire()

    def put(self, item: Answer) -> None:
        self.num_yielded += 1
        self._yielded.append(item)
        self._news.set()

    def end(self, error: Answer | None) -> None:
        self._complete = True
        self._yielded += [error] if error is not None else []
        self._news.set()

    async def take(self) -> tuple[list[Answer], bool]:
        """All items that nobody has fetched, at least one; and whether the stream is complete."""
        await self._news.wait()
        self._news.clear()
        taken, self._yielded = self._yielded, []
        return taken, self._complete

    def grant(self, num_items: int) -> None:
        for _ in range(num_items):
            self._credit.release()

    def close(self) -> None:
        """End the generator, wherever it waits."""
        if self.task is not None:
            self.task.cancel()


class Inbox:
    """The controller's side of one stream: (item, error) in order, then None."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[Any, BaseException | None] | None] = asyncio.Queue()
        self._num_arrived = 0
        self._later: deque[tuple[int, Callable[[], None]]] = deque()

    def put(self, item: Any, error: BaseException | None = None) -> None:
        self._queue.put_nowait((item, error))
        self._num_arrived += 1
        while self._later and self._later[0][0] <= self._num_arrived:
            self._later.popleft()[1]()

    def end(self) -> None:
        self._queue.put_nowait(None)
        while self._later:
            self._later.popleft()[1]()

    async def get(self) -> tuple[Any, BaseException | None] | None:
        return await self._queue.get()

    def after(self, num_items: int, then: Callable[[], None]) -> None:
        """Call `then` once `num_items` have arrived, or once no more items can arrive."""
        if num_items <= self._num_arrived:
            then()
        else:
            self._later.append((num_items, then))
