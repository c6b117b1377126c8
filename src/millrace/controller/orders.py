"""What the controller tells a replica to do, and the mailbox in which orders wait."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.core.pulse import Pulse
from millrace.core.types import Work

TICK_S = 60.0  # between two looks of a replica that no order woke


@dataclass(frozen=True, slots=True)
class Submit:
    works: list[Work]


@dataclass(frozen=True, slots=True)
class Pull:
    """Serve `version`. `discard`: what is in flight restarts from its prompts."""

    version: int
    discard: bool


@dataclass(frozen=True, slots=True)
class Move:
    """Everything in flight goes to replicas that serve the same version: how many trajectories to each."""

    shares: dict[str, int]


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop work on these trajectories: their results are not used any more."""

    trajectory_ids: list[int]


Order = Submit | Pull | Move | Abort


class Mailbox:
    """Orders for one replica, first come, first done. An order stays until it is done."""

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self._arrived = Pulse()

    def put(self, order: Order) -> None:
        self.orders.append(order)
        self._arrived.fire()

    async def first(self) -> Order:
        while not self.orders:
            await self._arrived.wait(timeout_s=TICK_S)
        return self.orders[0]

    def done(self) -> None:
        self.orders.pop(0)
