"""One replica's session: reports in, orders out.

Orders wait in a mailbox and are carried out one after the other; submitting is idempotent, so what a
dead replica never got is simply leased elsewhere.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from millrace.controller.pulse import Pulse
from millrace.core.errors import TornVersionError, UnknownVersionError, WorkerDied
from millrace.core.protocols import Handle
from millrace.core.types import Report, Served, Trajectory, Work

if TYPE_CHECKING:
    from millrace.controller.controller import Controller

IDLE_S = 60.0  # the mailbox is looked at this often even without a wake-up


@dataclass(frozen=True, slots=True)
class Submit:
    works: list[Work]


@dataclass(frozen=True, slots=True)
class Pull:
    version: int
    discard: bool


@dataclass(frozen=True, slots=True)
class Move:
    destination: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Work that nobody wants any more."""

    trajectory_ids: list[int]


Order = Submit | Pull | Move | Abort


class ReplicaSession:
    """`run` is one incarnation's session; the mailbox is emptied when it ends."""

    def __init__(self, name: str, controller: Controller) -> None:
        self.name = name
        self._controller = controller
        self._orders: list[Order] = []
        self._arrived = Pulse()

    def mail(self, order: Order) -> None:
        self._orders.append(order)
        self._arrived.fire()

    async def run(self, handle: Handle) -> None:
        controller = self._controller
        controller.state.replica_up(self.name, handle.epoch)
        controller.pulse.fire()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._reports(handle), name=f"{self.name}.reports")
                await self._carry_out(handle)
        finally:
            self._down()

    def _down(self) -> None:
        controller = self._controller
        self._undo_moves()
        self._orders.clear()
        for trajectory in controller.state.replica_down(self.name):
            if trajectory.live:
                controller.poisoned(trajectory, self.name)
        controller.pulse.fire()

    def _undo_moves(self) -> None:
        for order in self._orders:
            if isinstance(order, Move):
                self._controller.state.replicas[order.destination].busy = False

    # ------------------------------------------------------------ in

    async def _reports(self, handle: Handle) -> None:
        """Consumes the replica's one stream. Ends (with an error) when the replica does."""
        async for report in handle.stream("reports"):
            self._take_in(report)
        raise WorkerDied(f"{self.name}: its report stream ended")

    def _take_in(self, report: Report) -> None:
        controller, load = self._controller, report.load
        finished = controller.state.apply(self.name, report)
        if report.progress:
            controller.waits.progress()
        controller.events.emit(
            "report",
            replica=self.name,
            version=load.version,
            running=load.running,
            waiting=load.waiting,
            kv_used_tokens=load.kv_used_tokens,
            kv_capacity_tokens=load.kv_capacity_tokens,
            generated_tokens=load.generated_tokens,
            busy_s=load.busy_s,
            idle_s=load.idle_s,
        )
        self._finished(finished)

    def _finished(self, finished: list[Trajectory]) -> None:
        controller = self._controller
        for t in finished:
            controller.events.emit(
                "finished",
                trajectory_id=t.trajectory_id,
                tokens=len(t.tokens),
                versions_min=t.versions[0],
                versions_max=t.versions[-1],
                finish=t.finish,
            )
        controller.request_scores(finished)
        if finished:
            controller.pulse.fire()

    # ------------------------------------------------------------ out

    async def _carry_out(self, handle: Handle) -> None:
        """Consumes the mailbox. An order stays in it until it is done."""
        timeout_s = self._controller.config.supervision.lease_s
        while True:
            if not self._orders:
                await self._arrived.wait(timeout_s=IDLE_S)
                continue
            match self._orders[0]:
                case Submit(works):
                    await handle.call("submit", works, timeout_s=timeout_s)
                case Abort(trajectory_ids):
                    await handle.call("release", trajectory_ids, timeout_s=timeout_s)
                case Pull() as order:
                    await self._pull(handle, order)
                case Move() as order:
                    await self._move(handle, order)
            self._orders.pop(0)
            self._controller.pulse.fire()

    async def _pull(self, handle: Handle, order: Pull) -> None:
        controller = self._controller
        record = controller.state.replicas[self.name]
        if order.discard:
            for trajectory in await self._release(handle):
                controller.restart(trajectory, f"{self.name} goes to version {order.version}")
        try:
            if controller.endpoint is None:
                return  # the relay is gone; the next decision waits for the new one
            timeout_s = controller.config.supervision.step_timeout_s
            with controller.waits.waiting(self.name, f"version {order.version}"):
                served: Served = await handle.call(
                    "pull", order.version, controller.endpoint, timeout_s=timeout_s
                )
        except (UnknownVersionError, TornVersionError):
            return  # overwritten meanwhile; the next decision asks for the newest
        finally:
            record.busy = False
        controller.state.served(self.name, served)
        controller.waits.progress()
        controller.events.emit(
            "pulled",
            replica=self.name,
            version=served.version,
            digest=served.digest,
            pull_s=served.pull_s,
            swap_s=served.swap_s,
            in_flight=len(record.leased),
        )

    async def _move(self, handle: Handle, order: Move) -> None:
        """Everything here goes to `destination`, or waits for a replica if that one is gone."""
        controller, state = self._controller, self._controller.state
        destination, version = state.replicas[order.destination], state.replicas[self.name].version
        try:
            moved = await self._release(handle)
            works = []
            if destination.alive and destination.version == version:
                works = [state.lease(t, order.destination) for t in moved]
        finally:
            destination.busy = state.replicas[self.name].busy = False
        if works:
            controller.submit(order.destination, works)
        controller.events.emit(
            "moved",
            source=self.name,
            destination=order.destination,
            trajectories=[t.trajectory_id for t in moved],
            version=version,
        )

    async def _release(self, handle: Handle) -> list[Trajectory]:
        """Take back what the replica still works on. What it has just finished stays leased until its
        report arrives."""
        state = self._controller.state
        ids = list(state.replicas[self.name].leased)
        timeout_s = self._controller.config.supervision.lease_s
        parts = await handle.call("release", ids, timeout_s=timeout_s)
        self._finished(state.progress(self.name, parts))
        released = {part.trajectory_id for part in parts}
        back = [state.trajectories[i] for i in ids if i in released and i in state.replicas[self.name].leased]
        for trajectory in back:
            state.unlease(trajectory)
        return back
