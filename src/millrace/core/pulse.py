"""How loops wake each other: they wait for a pulse, with a deadline."""

from __future__ import annotations

import asyncio


class Pulse:
    """Wakes every waiter. Check the condition, then `wait`: no other coroutine runs between the two, so no
    pulse is lost. `count`: how often the pulse fired."""

    def __init__(self) -> None:
        self._event, self.count = asyncio.Event(), 0

    def fire(self) -> None:
        self.count += 1
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float) -> bool:
        """Whether the pulse fired within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        return True
