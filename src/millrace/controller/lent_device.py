"""The devices of a run, as its sessions use them: each worker has its own, or one is lent in turns.

`schedule/device_turns.py` decides whose turn it is. Here its orders are sent, and the trainer waits for
its turn.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from millrace.config.schema import Config
from millrace.controller.patience import Patience
from millrace.controller.state.orders import Mailbox, Rest
from millrace.controller.state.run_state import RunState
from millrace.controller.waits import Waits
from millrace.core import clock
from millrace.core.events import Events
from millrace.core.protocols import Handle
from millrace.core.pulse import Pulse
from millrace.core.types import Endpoint
from millrace.schedule.device_turns import DeviceView, HandOver, Use, hand_over

TICK_S = 1.0


class LendingRun(Protocol):
    """What of a `controller.context.RunContext` is used here."""

    config: Config
    state: RunState
    mailboxes: dict[str, Mailbox]
    pulse: Pulse
    waits: Waits
    events: Events
    patience: Patience

    @property
    def roots(self) -> tuple[Endpoint, ...]: ...


class OwnDevices:
    """Every worker has its devices for itself: nobody sleeps."""

    def __init__(self, run: LendingRun) -> None:
        self.call: Callable[..., Awaitable[Any]] = run.patience.call

    def up(self, name: str) -> None:
        """An incarnation of replica `name` begins."""

    def hand_over(self) -> None:
        """A round of decisions."""

    async def carry_out(self, handle: Handle, name: str, order: Rest) -> None:
        """Replica `name` sleeps or wakes."""

    async def give_back(self, handle: Handle) -> None:
        """The trainer has nothing to compute."""


class SharedDevice(OwnDevices):
    """The trainer has the device first: before version 0 there is nothing to generate with."""

    def __init__(self, run: LendingRun) -> None:
        self._run, self._commands = run, run.patience.call
        self._wanted, self._trainer_awake = True, False
        self._trainer: Handle | None = None  # the incarnation that `_trainer_awake` is about
        self.call = self._call

    def up(self, name: str) -> None:
        self._run.state.replicas.uses(name, Use.ASLEEP)

    def hand_over(self) -> None:
        turn = self._next()
        for names, use in ((turn.sleeps, Use.FALLING_ASLEEP), (turn.wakes, Use.WAKING)):
            for name in names:
                self._run.state.replicas.uses(name, use)
                self._run.mailboxes[name].put(Rest(asleep=use is Use.FALLING_ASLEEP))

    async def carry_out(self, handle: Handle, name: str, order: Rest) -> None:
        await self._order(handle, name, asleep=order.asleep)
        self._run.state.replicas.uses(name, Use.ASLEEP if order.asleep else Use.AWAKE)

    async def give_back(self, handle: Handle) -> None:
        """The trainer sleeps, once. Its next command wants the device again. Without a relay it stays awake:
        it is about to publish."""
        if self._trainer_awake and not self._run.roots:
            return
        if self._trainer_awake:
            await self._order(handle, "trainer", asleep=True)
        self._wanted = self._trainer_awake = False
        self._run.pulse.fire()

    async def _call(self, handle: Handle, method: str, *args: Any) -> Any:
        """A command for the trainer, in its turn.

        Raises: as `Handle.call`.
        """
        if handle is not self._trainer:  # a new process is asleep: it has loaded nothing
            self._trainer, self._trainer_awake = handle, False
        if not self._trainer_awake:
            await self._await_turn()
            await self._order(handle, "trainer", asleep=False)
        return await self._commands(handle, method, *args)

    async def _await_turn(self) -> None:
        """Wait until no replica is awake. Each has a session that waits for its sleep, with a deadline."""
        run, self._wanted = self._run, True
        run.pulse.fire()
        with run.waits.waiting("trainer", "the device, which replicas hold"):
            while not self._next().granted:
                await run.pulse.wait(timeout_s=TICK_S)
        self._trainer_awake = True

    async def _order(self, handle: Handle, name: str, *, asleep: bool) -> None:
        began_s = clock.now()
        await self._commands(handle, "sleep" if asleep else "wake")
        self._run.events.emit("slept" if asleep else "woke", name=name, took_s=clock.now() - began_s)

    def _next(self) -> HandOver:
        replicas = self._run.state.replicas.values()
        uses = {record.name: record.use for record in replicas if record.alive}
        return hand_over(DeviceView(self._wanted, self._trainer_awake, uses))


def devices(run: LendingRun) -> OwnDevices:
    return SharedDevice(run) if run.config.rollout.colocated else OwnDevices(run)
