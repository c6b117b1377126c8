"""How loops wake each other: a pulse, waited for with a deadline, and a record of who waits for what."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from millrace.core import clock


class Pulse:
    """Wakes every waiter. Check the condition, then `wait`: nothing is lost in between, because no
    other coroutine runs between the two."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float) -> bool:
        """True if it fired within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        return True


class Waits:
    """Who waits for what, since when; and when the run last made progress."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[str, float]] = {}
        self.progressed_s = 0.0

    @contextmanager
    def waiting(self, who: str, what: str) -> Iterator[None]:
        self._open[who] = (what, clock.now())
        try:
            yield
        finally:
            self._open.pop(who, None)

    def progress(self) -> None:
        self.progressed_s = clock.now()

    def excuse(self, seconds: float) -> None:
        """That long nobody could have made progress."""
        self.progressed_s += seconds

    def describe(self) -> list[str]:
        """One line per wait, the longest first."""
        now = clock.now()
        lines = sorted(self._open.items(), key=lambda item: item[1][1])
        return [f"{who} waits for {what} ({now - since:.1f} s)" for who, (what, since) in lines]
