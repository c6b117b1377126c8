"""The simulated runtime: workers as objects in this process, under virtual time and seeded faults.

Needs a `sim.virtual.loop.VirtualLoop` (any asyncio loop works, without repeatability). Every message
travels through a `_Link`, which delays it and keeps the order of its direction, unless a fault says
otherwise: see `sim.virtual.faults`, and docs/chaos.md for what may befall a message and what never does.

Isolation: arguments, results and stream items are copied by pickling, as between processes, so what
one side mutates the other does not see and what cannot be pickled fails here too. `isolate=False`
shares them, for planning runs whose roles are known not to mutate messages. The `kwargs` of `spawn`
are never copied: through them simulated roles share what outlives a process.

A killed worker falls silent at once: nothing it sends leaves it any more. Its tasks are cancelled, so
their `finally` blocks still run, which those of a killed process would not. One that is cut off cannot
be reached by a kill: its handle is dead at once, and it runs on as a zombie until the cut is over.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import pickle
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from contextvars import copy_context
from typing import Any

from millrace.core.errors import MillraceError, StaleEpochError, WorkerDied, WorkerError
from millrace.core.placement import HERE, Place
from millrace.core.types import Vitals
from millrace.runtime.seam import (
    CREDIT_STEP,
    PING,
    STREAM_WINDOW,
    begin_call,
    begin_stream,
    crossing,
    died,
    late,
    load_class,
    where,
)
from millrace.sim.virtual.faults import Fate, Faults, Latency, pace
from millrace.sim.virtual.seeded import stream

_END = object()
STUCK = 1e12
"""Slowdown of a worker that gets nowhere."""


class _Link:
    """One direction of one connection: in order, each message with its delay."""

    def __init__(self, delay: Callable[[], float]) -> None:
        self._delay = delay
        self._loop = asyncio.get_running_loop()
        self._arrival_s = 0.0
        self._in_flight: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()

    def send(self, deliver: Callable[..., None], *args: Any) -> None:
        self._arrival_s = max(self._arrival_s, self._loop.time() + self._delay())
        self._in_flight.append((deliver, args))
        self._loop.call_at(self._arrival_s, self._deliver_next)

    def send_apart(self, extra_s: float, deliver: Callable[..., None], *args: Any) -> None:
        """Outside the order of the others."""
        self._loop.call_later(self._delay() + extra_s, deliver, *args)

    def _deliver_next(self) -> None:
        deliver, args = self._in_flight.popleft()
        deliver(*args)


class _Channel:
    """One stream: what has arrived, and how many more items the worker may send."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[Any] = asyncio.Queue()
        self.credit = asyncio.Semaphore(STREAM_WINDOW)
        self.task: asyncio.Task[None] | None = None

    def grant(self) -> None:
        for _ in range(CREDIT_STEP):
            self.credit.release()


class _Worker:
    """The far side: one incarnation's object and the tasks that run its methods."""

    def __init__(self, runtime: SimRuntime, name: str, epoch: int) -> None:
        self.name, self.epoch = name, epoch
        self.alive = True
        self._runtime = runtime
        self._loop = asyncio.get_running_loop()
        self._instance: Any = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._context = copy_context()
        self._context.run(pace.set, self._slowdown)
        self._stuck_s = runtime.faults.stuck_s(name, self._loop.time())
        self._calls: list[str] = []
        self._rng = stream(runtime.seed, "worker", name, epoch)
        self._cut = (math.inf, math.inf)
        self.inbox, self.outbox = _Link(self._delay), _Link(self._delay)
        self._deaths: list[asyncio.TimerHandle] = []
        self.handle = SimHandle(runtime, self)

    def _delay(self) -> float:
        now = self._loop.time()
        held = self._cut[1] - now if self._is_cut_off else 0.0
        return held + self._runtime.latency.draw(self._rng) + self._runtime.faults.lag(self.name, now)

    def _slowdown(self) -> float:
        now_s = self._loop.time()
        return STUCK if now_s >= self._stuck_s else self._runtime.faults.slowdown(self.name, now_s)

    def _vitals(self) -> Vitals:
        """It computes all the time, however slowly, unless it is stuck."""
        return Vitals(
            cpu_s=min(self._loop.time(), self._stuck_s),
            resident_bytes=0,
            disk=False,
            calls=sorted(self._calls),
        )

    @property
    def _is_cut_off(self) -> bool:
        return self._cut[0] <= self._loop.time() < self._cut[1]

    def fate(self) -> Fate:
        """Of the next call."""
        return self._runtime.faults.fate(self.name, self._rng)

    def straggle_s(self) -> float:
        """Extra delay of a message that left its queue."""
        return self._runtime.faults.straggle_s(self.name, self._rng)

    # -------------------------------------------------------- life

    async def start(self, target: str, kwargs: Mapping[str, Any], timeout_s: float) -> None:
        faults = self._runtime.faults
        spawn_s = self._rng.uniform(*faults.spawn_s) * faults.slowdown(self.name, self._loop.time())
        await asyncio.sleep(min(spawn_s, timeout_s))
        if spawn_s > timeout_s:
            raise late(self.name, self.epoch, "start", timeout_s)
        if not self.alive:
            raise died(self.name, self.epoch, "start", "it did not live long enough")
        try:
            self._instance = self._context.copy().run(lambda: load_class(target)(**kwargs))
        except Exception as error:
            raise self._crossing(error, "start") from None
        for when in faults.times_of_death(self.name, self._loop.time(), self._rng):
            self._deaths.append(self._loop.call_at(when, self.die, "crashed (simulated fault)"))
        self._cut = faults.cut(self.name, self._loop.time(), self._rng)

    def kill(self) -> None:
        """Die; or, cut off, be given up now and die when the cut is over. Idempotent."""
        if not (self.alive and self._is_cut_off):
            self.die("was killed")
        elif not self.handle.given_up:
            self._runtime.haunt(self)
            self._deaths.append(self._loop.call_at(self._cut[1], self.die, "was killed"))
            self.handle.given_up = True
            self._loop.call_later(self._runtime.faults.notice_s, self.handle.on_death, "was given up")

    def die(self, cause: str) -> None:
        """Fall silent now; the handle learns of it a moment later. Idempotent."""
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
        self._loop.call_later(self._runtime.faults.notice_s, self.handle.on_death, cause)

    async def buried(self) -> None:
        """Wait until no task of this worker is left and its handle knows."""
        await asyncio.gather(*self._tasks, self.handle.dead, return_exceptions=True)

    # -------------------------------------------------------- serving

    def begin_call(
        self, epoch: int, method: str, args: tuple[Any, ...], reply: asyncio.Future[Any], fate: Fate
    ) -> None:
        if epoch == self.epoch:
            self._own(self._answer(method, args, reply, fate), method)
        else:
            self._reply(fate, _fail, reply, self._stale(epoch))

    def begin_again(self, method: str, args: tuple[Any, ...], reply: asyncio.Future[Any]) -> None:
        """The second copy of a request: executed, unless its call is over, and not answered."""
        if not reply.done():
            self._own(self._answer(method, args, reply, Fate.UNANSWERED), method)

    def begin_stream(self, epoch: int, method: str, args: tuple[Any, ...], channel: _Channel) -> None:
        if epoch == self.epoch:
            channel.task = self._own(self._feed(method, args, channel), method)
        else:
            self._send(channel.arrived.put_nowait, (None, self._stale(epoch)))

    def end_stream(self, channel: _Channel) -> None:
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
            result = self._runtime.copied(await self._call(method, args))
        except SystemExit as end:
            self.die(f"exited with code {end.code}")
        except (Exception, asyncio.CancelledError) as error:
            self._reply(fate, _fail, reply, self._crossing(error, method))
        else:
            self._reply(fate, _resolve, reply, result)

    async def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        if method == PING:
            return self._vitals()
        answer = begin_call(self._instance, method, args)
        self._calls.append(method)
        try:
            return await answer
        finally:
            self._calls.remove(method)

    async def _feed(self, method: str, args: tuple[Any, ...], channel: _Channel) -> None:
        arrived = channel.arrived.put_nowait
        try:
            async with aclosing(begin_stream(self._instance, method, args)) as items:
                await channel.credit.acquire()
                async for item in items:
                    self._send(arrived, (self._runtime.copied(item), None))
                    await channel.credit.acquire()
        except Exception as error:
            self._send(arrived, (None, self._crossing(error, method)))
        else:
            self._send(arrived, (_END, None))

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


class SimHandle:
    """The near side of one incarnation; see `core.protocols.Handle`."""

    def __init__(self, runtime: SimRuntime, worker: _Worker) -> None:
        self.name, self.epoch = worker.name, worker.epoch
        self._loop = asyncio.get_running_loop()
        self.dead: asyncio.Future[str] = self._loop.create_future()
        self._runtime, self._worker = runtime, worker
        self.given_up = False  # killed while it could not be reached
        self._replies: dict[asyncio.Future[Any], str] = {}  # what is in flight, and its method
        self._channels: dict[_Channel, str] = {}

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        self._refuse_if_dead(method)
        reply: asyncio.Future[Any] = self._loop.create_future()
        deadline = self._loop.call_later(timeout_s, self._expire, reply, method, timeout_s)
        self._replies[reply] = method
        self._request(method, args, reply)
        try:
            return await reply
        finally:
            deadline.cancel()
            del self._replies[reply]

    def _request(self, method: str, args: tuple[Any, ...], reply: asyncio.Future[Any]) -> None:
        worker, fate = self._worker, self._worker.fate()
        begin = (worker.begin_call, self.epoch, method, self._runtime.copied(args), reply, fate)
        if fate is Fate.OVERTAKEN:
            worker.inbox.send_apart(worker.straggle_s(), *begin)
        elif fate is not Fate.LOST:
            worker.inbox.send(*begin)
        if fate is Fate.DOUBLED:
            worker.inbox.send(worker.begin_again, method, self._runtime.copied(args), reply)

    async def stream(self, method: str, *args: Any) -> AsyncGenerator[Any, None]:
        self._refuse_if_dead(method)
        channel, worker = _Channel(), self._worker
        self._channels[channel] = method
        worker.inbox.send(worker.begin_stream, self.epoch, method, self._runtime.copied(args), channel)
        complete = False
        try:
            for num_taken in itertools.count(1):
                item, error = await channel.arrived.get()
                complete = error is not None or item is _END
                if error is not None:
                    raise error
                if complete:
                    return
                if num_taken % CREDIT_STEP == 0:
                    worker.inbox.send(channel.grant)
                yield item
        finally:
            del self._channels[channel]
            if not complete:
                worker.inbox.send(worker.end_stream, channel)

    def kill(self) -> None:
        self._worker.kill()

    def on_death(self, cause: str) -> None:
        """The death notice: break everything in flight."""
        self._runtime.forget(self._worker)
        if not self.dead.done():
            self.dead.set_result(cause)
        for reply, method in self._replies.items():
            _fail(reply, self._death(method, cause))
        for channel, method in self._channels.items():
            channel.arrived.put_nowait((None, self._death(method, cause)))

    def _expire(self, reply: asyncio.Future[Any], method: str, timeout_s: float) -> None:
        _fail(reply, late(self.name, self.epoch, method, timeout_s))

    def _death(self, method: str, cause: str) -> WorkerDied:
        return died(self.name, self._worker.epoch, method, cause)

    def _refuse_if_dead(self, method: str) -> None:
        if self.dead.done():
            raise self._death(method, self.dead.result())


class SimRuntime:
    """Workers in this process, under virtual time; see `core.protocols.Runtime`.

    The caller passes targets: simulated roles (`millrace.sim.roles:SimReplica`) stand where a real run
    has real ones.
    """

    def __init__(
        self, seed: int, *, faults: Faults = Faults(), latency: Latency = Latency(), isolate: bool = True
    ) -> None:
        self.seed, self.faults, self.latency = seed, faults, latency
        self._isolate = isolate
        self._closed = False
        self._epochs: dict[str, int] = {}
        self._workers: dict[str, _Worker] = {}
        self._zombies: list[_Worker] = []

    async def spawn(
        self,
        name: str,
        target: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        place: Place = HERE,
        timeout_s: float = 60.0,
    ) -> SimHandle:
        if self._closed:
            raise WorkerError(f"worker {name} cannot start: the runtime is closed")
        if name in self._workers and self._workers[name].alive:
            raise WorkerError(f"worker {name} is running (epoch {self._epochs[name]}): kill it first")
        self._epochs[name] = self._epochs.get(name, 0) + 1
        worker = self._workers[name] = _Worker(self, name, self._epochs[name])
        try:
            await worker.start(target, kwargs or {}, timeout_s)
        except BaseException:
            worker.die("did not start")
            raise
        return worker.handle

    async def close(self) -> None:
        self._closed = True
        workers = [*self._zombies, *self._workers.values()]
        for worker in workers:
            worker.die("was stopped")
        for worker in workers:
            await worker.buried()

    # -------------------------------------------------------- for handles and tests

    def crash(self, name: str) -> None:
        """Kill the present incarnation of `name`, if one is alive, as a fault would."""
        if name in self._workers:
            self._workers[name].die("crashed (simulated fault)")

    def forget(self, worker: _Worker) -> None:
        if self._workers.get(worker.name) is worker:
            del self._workers[worker.name]

    def haunt(self, worker: _Worker) -> None:
        """`worker` is given up and lives on: another may take its name."""
        self.forget(worker)
        self._zombies.append(worker)

    def copied(self, message: Any) -> Any:
        return pickle.loads(pickle.dumps(message, pickle.HIGHEST_PROTOCOL)) if self._isolate else message


def _resolve(reply: asyncio.Future[Any], result: Any) -> None:
    if not reply.done():
        reply.set_result(result)


def _fail(reply: asyncio.Future[Any], error: BaseException) -> None:
    if not reply.done():
        reply.set_exception(error)
