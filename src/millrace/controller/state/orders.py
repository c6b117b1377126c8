"""The controller's orders for a replica, and the mailbox in which orders wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from millrace.core.pulse import Pulse
from millrace.core.types import Work

T = TypeVar("T")
TICK_S = 60.0  # between two looks into a mailbox without a pulse


@dataclass(frozen=True, slots=True)
class Submit:
    works: list[Work]


@dataclass(frozen=True, slots=True)
class Pull:
    """Serve `version`. `discard`: trajectories in flight restart from their prompts."""

    version: int
    discard: bool


@dataclass(frozen=True, slots=True)
class Move:
    """All trajectories in flight go to replicas that serve the same version. `shares`: how many to each."""

    shares: dict[str, int]


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop work on these trajectories: their tokens are not used any more."""

    trajectory_ids: list[int]


@dataclass(frozen=True, slots=True)
class Rest:
    """Sleep, or wake, because the device is lent in turns."""

    asleep: bool


Order = Submit | Pull | Move | Abort | Rest


class Mailbox:
    """Orders for one replica, carried out in the order of their arrival. An order stays until it is done. A
    mailbox is closed when its replica leaves: then the order under way is the last one."""

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.closed = False
        self._arrived = Pulse()
        self._limit: asyncio.Timeout | None = None

    def put(self, order: Order) -> None:
        self.orders.append(order)
        self._arrived.fire()

    def close(self) -> None:
        """Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._arrived.fire()
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time())

    async def first(self) -> Order | None:
        """The oldest order; None: the mailbox was closed."""
        while not (self.orders or self.closed):
            await self._arrived.wait(timeout_s=TICK_S)
        return None if self.closed else self.orders[0]

    async def unless_closed(self, answer: Awaitable[T]) -> T | None:
        """`answer`; None: the mailbox was closed before it came."""
        try:
            async with asyncio.timeout(None) as self._limit:
                return await answer
        except TimeoutError:
            if not self.closed:
                raise
            return None
        finally:
            self._limit = None

    def done(self) -> None:
        self.orders.pop(0)
