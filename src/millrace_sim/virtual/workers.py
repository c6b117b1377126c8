"""One incarnation of a simulated worker: its object, and the tasks that run the object's methods.

A killed worker sends nothing any more. Its tasks are cancelled, so their `finally` blocks still run. Those of
a killed process would not. A kill does not reach a worker that is cut off: its handle is dead at once, and
the worker runs on until the cut is over.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping
from contextlib import aclosing
from contextvars import copy_context
from typing import Any

from millrace.core.errors import MillraceError, StaleEpochError
from millrace.core.progress import Vitals
from millrace.runtime.seam import PING, ExecutedCalls, begin_stream, crossing, died, late, load_class, where
from millrace_sim.virtual.faults import Fate, pace
from millrace_sim.virtual.links import END, Channel, Conditions, SimulatedLink, fail, resolve
from millrace_sim.virtual.seeded import stream

STUCK = 1e12
"""Slowdown of a worker that makes no progress."""


class SimulatedWorker:
    """The far side: one incarnation's object and the tasks that run its methods."""

    def __init__(self, conditions: Conditions, name: str, epoch: int) -> None:
        self.name, self.epoch = name, epoch
        self.alive = True
        self._conditions = conditions
        self._loop = asyncio.get_running_loop()
        self._instance: Any = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._context = copy_context()
        self._context.run(pace.set, self._slowdown)
        self._stuck_s = conditions.faults.stuck_s(name, self._loop.time())
        self._calls = ExecutedCalls()
        self._rng = stream(conditions.seed, "worker", name, epoch)
        self._cut = (math.inf, math.inf)
        self.inbox, self.outbox = SimulatedLink(self._delay), SimulatedLink(self._delay)
        self._deaths: list[asyncio.TimerHandle] = []
        self.dead: asyncio.Future[str] = self._loop.create_future()
        self.on_death: Callable[[str], None] = self.dead.set_result  # of the handle, once there is one
        self.given_up = False  # killed while it could not be reached

    def _delay(self) -> float:
        now = self._loop.time()
        cut_s = self._cut[1] - now if self._is_cut_off else 0.0
        return cut_s + self._conditions.latency.draw(self._rng) + self._conditions.faults.lag(self.name, now)

    def _slowdown(self) -> float:
        now_s = self._loop.time()
        return STUCK if now_s >= self._stuck_s else self._conditions.faults.slowdown(self.name, now_s)

    def _vitals(self) -> Vitals:
        """The worker computes all the time, perhaps slowly, unless it is stuck."""
        return Vitals(
            cpu_s=min(self._loop.time(), self._stuck_s),
            resident_bytes=0,
            disk=False,
            calls=self._calls.vitals(),
        )

    @property
    def _is_cut_off(self) -> bool:
        return self._cut[0] <= self._loop.time() < self._cut[1]

    def fate(self) -> Fate:
        """Draws the fate of the next call."""
        return self._conditions.faults.fate(self.name, self._rng)

    def straggle_s(self) -> float:
        """Extra delay of a message that left its queue."""
        return self._conditions.faults.straggle_s(self.name, self._rng)

    # -------------------------------------------------------- life

    async def start(self, target: str, kwargs: Mapping[str, Any], timeout_s: float) -> None:
        faults = self._conditions.faults
        spawn_s = faults.start_s(self.name, self._rng) * faults.slowdown(self.name, self._loop.time())
        await asyncio.sleep(min(spawn_s, timeout_s))
        if spawn_s > timeout_s:
            raise late(self.name, self.epoch, "start", timeout_s)
        if not self.alive:
            raise died(self.name, self.epoch, "start", "it was stopped before it had started")
        try:
            self._instance = self._context.copy().run(lambda: load_class(target)(**kwargs))
        except Exception as error:
            raise self._crossing(error, "start") from None
        for when in faults.times_of_death(self.name, self._loop.time(), self._rng):
            self._deaths.append(self._loop.call_at(when, self.die, "crashed (simulated fault)"))
        for noticed_s, ends_s in faults.times_of_notice(self.name, self._loop.time()):
            self._deaths.append(self._loop.call_at(noticed_s, self._instance.notice))
            self._deaths.append(self._loop.call_at(ends_s, self.die, "ended after its notice"))
        self._cut = faults.cut(self.name, self._loop.time(), self._rng)

    def kill(self) -> None:
        """Die now. The handle of a worker that is cut off is dead now; the worker dies when the cut is over.
        Idempotent."""
        if not (self.alive and self._is_cut_off):
            self.die("was killed")
        elif not self.given_up:
            self._deaths.append(self._loop.call_at(self._cut[1], self.die, "was killed"))
            self.given_up = True
            self._loop.call_later(self._conditions.faults.notice_s, self.on_death, "was given up")

    def die(self, cause: str) -> None:
        """Send nothing from now on. The handle learns of the death a moment later. Idempotent."""
        if not self.alive:
            return
        self.alive = False
        for timer in self._deaths:
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        reclaim = getattr(self._instance, "reclaim", None)
        if reclaim is not None:
            reclaim()
        self._instance = None
        self._loop.call_later(self._conditions.faults.notice_s, self.on_death, cause)

    async def ended(self) -> None:
        """Wait until this worker has no task left and its handle knows."""
        await asyncio.gather(*self._tasks, self.dead, return_exceptions=True)

    # -------------------------------------------------------- serving

    def begin_call(
        self, epoch: int, method: str, args: tuple[Any, ...], reply: asyncio.Future[Any], fate: Fate
    ) -> None:
        if epoch == self.epoch:
            self._own(self._answer(method, args, reply, fate), method)
        else:
            self._reply(fate, fail, reply, self._stale(epoch))

    def begin_again(self, method: str, args: tuple[Any, ...], reply: asyncio.Future[Any]) -> None:
        """The second copy of a request: executed, unless its call is over, and not answered."""
        if not reply.done():
            self._own(self._answer(method, args, reply, Fate.UNANSWERED), method)

    def begin_stream(self, epoch: int, method: str, args: tuple[Any, ...], channel: Channel) -> None:
        if epoch == self.epoch:
            channel.task = self._own(self._feed(method, args, channel), method)
        else:
            self._send(channel.arrived.put_nowait, (None, self._stale(epoch)))

    def end_stream(self, channel: Channel) -> None:
        if channel.task is not None:
            channel.task.cancel()

    def _own(self, coroutine: Coroutine[Any, Any, None], method: str) -> asyncio.Task[None] | None:
        if not self.alive:
            coroutine.close()
            return None
        task = self._loop.create_task(
            coroutine, name=f"{self.name}[{self.epoch}].{method}", context=self._context.copy()
        )
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    async def _answer(
        self, method: str, args: tuple[Any, ...], reply: asyncio.Future[Any], fate: Fate
    ) -> None:
        try:
            result = self._conditions.copied(await self._call(method, args))
        except SystemExit as end:
            self.die(f"exited with code {end.code}")
        except (Exception, asyncio.CancelledError) as error:
            self._reply(fate, fail, reply, self._crossing(error, method))
        else:
            self._reply(fate, resolve, reply, result)

    async def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        if method == PING:
            return self._vitals()
        return await self._calls.run(self._instance, method, args)

    async def _feed(self, method: str, args: tuple[Any, ...], channel: Channel) -> None:
        arrived = channel.arrived.put_nowait
        try:
            async with aclosing(begin_stream(self._instance, method, args)) as items:
                await channel.credit.acquire()
                async for item in items:
                    self._send(arrived, (self._conditions.copied(item), None))
                    await channel.credit.acquire()
        except Exception as error:
            self._send(arrived, (None, self._crossing(error, method)))
        else:
            self._send(arrived, (END, None))

    def _send(self, deliver: Callable[..., None], *args: Any) -> None:
        if self.alive:
            self.outbox.send(deliver, *args)

    def _reply(self, fate: Fate, deliver: Callable[..., None], *args: Any) -> None:
        if fate is Fate.OVERTAKEN and self.alive:
            self.outbox.send_apart(self.straggle_s(), deliver, *args)
        elif fate is not Fate.UNANSWERED:
            self._send(deliver, *args)

    def _crossing(self, error: BaseException, method: str) -> MillraceError:
        return crossing(error, where(self.name, self.epoch, method))

    def _stale(self, epoch: int) -> StaleEpochError:
        return StaleEpochError(
            f"{self.name}: a command for epoch {epoch} reached epoch {self.epoch}; use the newest handle"
        )
