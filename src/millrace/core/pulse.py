"""How loops wake each other: a pulse, waited for with a deadline."""

from __future__ import annotations

import asyncio


class Pulse:
    """Wakes every waiter. Check the condition, then `wait`: nothing is lost in between, because no
    other coroutine runs between the two. `count`: how often it fired."""

    def __init__(self) -> None:
        self._event, self.count = asyncio.Event(), 0

    def fire(self) -> None:
        self.count += 1
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
