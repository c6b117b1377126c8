"""The simulated runtime: workers as objects in this process, under virtual time and seeded faults.

Needs a `sim.virtual.loop.VirtualLoop` (any asyncio loop works, without repeatability). Every message
travels through a `Link`, which delays it and keeps the order of its direction, unless a fault says
otherwise. `sim.virtual.faults` and docs/failures.md list the possible faults of messages.

Isolation: arguments, results and stream items are copied by pickling, as between processes. So neither side
sees changes of the other side, and objects that cannot be pickled fail here too. `isolate=False` shares the
objects, for planning runs whose roles do not change messages. The `kwargs` of `spawn` are never copied:
through them simulated roles share the state that outlives a process.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncGenerator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from millrace.core.errors import WorkerDied, WorkerError
from millrace.core.placement import HERE, Place
from millrace.core.protocols import Done
from millrace.runtime.seam import CREDIT_STEP, died, late
from millrace_sim.virtual.faults import Fate, Faults, Latency
from millrace_sim.virtual.links import END, Channel, Conditions, fail
from millrace_sim.virtual.workers import SimulatedWorker


class SimHandle:
    """The near side of one incarnation; see `core.protocols.Handle`."""

    def __init__(self, runtime: SimRuntime, worker: SimulatedWorker) -> None:
        self.name, self.epoch = worker.name, worker.epoch
        self._loop = asyncio.get_running_loop()
        self.dead = worker.dead
        self._runtime, self._worker = runtime, worker
        worker.on_death = self.on_death
        self._replies: dict[asyncio.Future[Any], str] = {}  # calls in flight, and their methods
        self._channels: dict[Channel, str] = {}
        self._copied = runtime.conditions.copied

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        self._refuse_if_dead(method)
        reply: asyncio.Future[Any] = self._loop.create_future()
        deadline = None
        if timeout_s < math.inf:
            deadline = self._loop.call_later(timeout_s, self._expire, reply, method, timeout_s)
        self._replies[reply] = method
        self._request(method, args, reply)
        try:
            return await reply
        finally:
            if deadline is not None:
                deadline.cancel()
            del self._replies[reply]

    def _request(self, method: str, args: tuple[Any, ...], reply: asyncio.Future[Any]) -> None:
        worker, fate = self._worker, self._worker.fate()
        begin = (worker.begin_call, self.epoch, method, self._copied(args), reply, fate)
        if fate is Fate.OVERTAKEN:
            worker.inbox.send_apart(worker.straggle_s(), *begin)
        elif fate is not Fate.LOST:
            worker.inbox.send(*begin)
        if fate is Fate.DOUBLED:
            worker.inbox.send(worker.begin_again, method, self._copied(args), reply)

    def call_then(self, method: str, *args: Any, done: Done) -> None:
        self._refuse_if_dead(method)
        reply: asyncio.Future[Any] = self._loop.create_future()
        self._replies[reply] = method
        reply.add_done_callback(partial(self._deliver, done))
        self._request(method, args, reply)

    def _deliver(self, done: Done, reply: asyncio.Future[Any]) -> None:
        del self._replies[reply]
        error = reply.exception()
        assert error is None or isinstance(error, Exception)
        done(None, error) if error is not None else done(reply.result(), None)

    async def stream(self, method: str, *args: Any) -> AsyncGenerator[Any, None]:
        self._refuse_if_dead(method)
        channel, worker = Channel(), self._worker
        self._channels[channel] = method
        worker.inbox.send(worker.begin_stream, self.epoch, method, self._copied(args), channel)
        complete = False
        try:
            for num_taken in itertools.count(1):
                item, error = await channel.arrived.get()
                complete = error is not None or item is END
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
        if self._worker.given_up:
            self._runtime.give_up(self._worker)

    def on_death(self, cause: str) -> None:
        """The death notice: end all calls and streams in flight with an error."""
        self._runtime.forget(self._worker)
        if not self.dead.done():
            self.dead.set_result(cause)
        for reply, method in self._replies.items():
            fail(reply, self._death(method, cause))
        for channel, method in self._channels.items():
            channel.arrived.put_nowait((None, self._death(method, cause)))

    def _expire(self, reply: asyncio.Future[Any], method: str, timeout_s: float) -> None:
        fail(reply, late(self.name, self.epoch, method, timeout_s))

    def _death(self, method: str, cause: str) -> WorkerDied:
        return died(self.name, self._worker.epoch, method, cause)

    def _refuse_if_dead(self, method: str) -> None:
        if self.dead.done():
            raise self._death(method, self.dead.result())


class SimRuntime:
    """Workers in this process, under virtual time; see `core.protocols.Runtime`.

    The caller passes targets: simulated roles (`millrace_sim.roles:SimReplica`) take the place of a real
    run's roles.
    """

    def __init__(
        self, seed: int, *, faults: Faults = Faults(), latency: Latency = Latency(), isolate: bool = True
    ) -> None:
        self.conditions = Conditions(seed, faults, latency, isolate)
        self._closed = False
        self._epochs: dict[str, int] = {}
        self._workers: dict[str, SimulatedWorker] = {}
        self._given_up: dict[SimulatedWorker, None] = {}

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
        worker = self._workers[name] = SimulatedWorker(self.conditions, name, self._epochs[name])
        handle = SimHandle(self, worker)
        try:
            await worker.start(target, kwargs or {}, timeout_s)
        except BaseException:
            worker.die("did not start")
            raise
        return handle

    async def close(self) -> None:
        self._closed = True
        workers = [*self._given_up, *self._workers.values()]
        for worker in workers:
            worker.die("was stopped")
        for worker in workers:
            await worker.ended()

    # -------------------------------------------------------- for handles and tests

    def crash(self, names: str) -> None:
        """Kill the incarnations that are alive, as a fault would. `names`: a shell pattern."""
        for worker in [one for name, one in self._workers.items() if fnmatchcase(name, names)]:
            worker.die("crashed (simulated fault)")

    def forget(self, worker: SimulatedWorker) -> None:
        if self._workers.get(worker.name) is worker:
            del self._workers[worker.name]

    def give_up(self, worker: SimulatedWorker) -> None:
        """`worker` could not be reached and runs on. Another worker may take its name. Idempotent."""
        self.forget(worker)
        self._given_up[worker] = None
