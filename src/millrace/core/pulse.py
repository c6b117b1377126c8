"""How loops wake each other: they wait for a pulse, with a deadline."""

from __future__ import annotations

import asyncio


class Pulse:
    """Wakes every waiter. Check the condition, then `wait`: no other coroutine runs between the two, so no
    pulse is lost. `count`: how often the pulse fired."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[bool], None] = {}  # in the order in which they began to wait
        self.count = 0

    def fire(self) -> None:
        self.count += 1
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            _end(waiter, True)

    async def wait(self, timeout_s: float) -> bool:
        """Whether the pulse fired within `timeout_s`."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiters[waiter] = None
        timer = loop.call_later(timeout_s, _end, waiter, False)
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiters.pop(waiter, None)


def _end(waiter: asyncio.Future[bool], fired: bool) -> None:
    if not waiter.done():
        waiter.set_result(fired)
