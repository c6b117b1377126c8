"""A worker that exercises a runtime: it answers, fails, streams and waits on command.

The worker uses asyncio only, so it behaves the same in a process and under virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from millrace.core.errors import DataError


class LockedError(Exception):
    """An exception that cannot be pickled."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = lambda: None


class LockedDataError(DataError):
    """One of ours that cannot be pickled."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = lambda: None


FAILURES: dict[str, type[Exception]] = {
    "ours": DataError,
    "foreign": ZeroDivisionError,
    "locked": LockedError,
    "locked_ours": LockedDataError,
}


class Probe:
    """`fail` names the failure (a key of FAILURES) that the constructor raises."""

    def __init__(self, *, fail: str | None = None, message: str = "") -> None:
        if fail is not None:
            raise FAILURES[fail](message)
        self._running = 0
        self._produced = 0
        self._open_streams = 0
        self._met = 0
        self._meeting = asyncio.Event()
        self._feed: asyncio.Queue[Any] = asyncio.Queue()

    async def echo(self, value: Any) -> Any:
        return value

    async def fail(self, failure: str, message: str) -> None:
        raise FAILURES[failure](message)

    async def meet(self, num_parties: int, value: Any) -> Any:
        """Return once `num_parties` calls are here at the same time."""
        self._met += 1
        if self._met >= num_parties:
            self._meeting.set()
        await self._meeting.wait()
        return value

    async def sleep(self, seconds: float) -> None:
        self._running += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            self._running -= 1

    async def running(self) -> int:
        """Calls of `sleep` in flight."""
        return self._running

    async def count(self, stop: int, delay_s: float = 0.0, fail: str | None = None) -> AsyncIterator[int]:
        """Yield 0 .. stop-1, then raise `fail`, unless it is None."""
        self._produced = 0
        self._open_streams += 1
        try:
            for i in range(stop):
                if delay_s:
                    await asyncio.sleep(delay_s)
                self._produced += 1
                yield i
            if fail is not None:
                raise FAILURES[fail]("after the last item")
        finally:
            self._open_streams -= 1

    async def produced(self) -> int:
        """Items that the latest `count` has yielded so far."""
        return self._produced

    async def open_streams(self) -> int:
        """Generators of `count` that have started and not ended."""
        return self._open_streams

    async def listen(self) -> AsyncIterator[Any]:
        """Yield the items of `feed`, until the stream is closed."""
        while True:
            yield await self._feed.get()
            self._feed.task_done()

    async def feed(self, items: list[Any]) -> int:
        """Return once `listen` has yielded all of `items` and its consumer wants more."""
        for item in items:
            self._feed.put_nowait(item)
        await self._feed.join()
        return len(items)

    async def _private(self) -> None:
        """Never reachable from outside."""
