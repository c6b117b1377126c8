"""The controller's side of one worker on Ray; `millrace_ray.actor` is the worker's side.

The call `live` never returns. When the worker dies, Ray fails this call. When a worker is killed and its host
is cut off, Ray reports nothing: the worker counts as dead after `KILL_S`. Its lease runs out on that host,
and nobody commands its epoch again.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from millrace.core.errors import DataError, MillraceError, RemoteError
from millrace.core.protocols import Done
from millrace.runtime import process
from millrace.runtime.blocking_calls import in_thread
from millrace.runtime.seam import CREDIT_STEP, PING, died, late, where
from millrace_ray.actor import ActorSetup, Answer, Inbox, packed, unpacked
from millrace_ray.cluster import ClusterConnection
from millrace_ray.places import Node

KILL_S = 5.0
"""After a kill Ray has this long to report the death."""

STRAY_S = 1.0
"""A worker that still lives this long after the request to Ray cannot run. A signal kills the worker."""


class RayHandle:
    """One incarnation of one worker; see `core.protocols.Handle`. `node` is the id of the worker's Ray node,
    and `address` is the address of this node."""

    def __init__(self, name: str, epoch: int, cluster: ClusterConnection, namespace: str, node: Node) -> None:
        self.name, self.epoch, self.node, self.address = name, epoch, node.node_id, node.address
        self._namespace = namespace
        self.pid: int | None = None
        self.suspended = False
        self._loop = asyncio.get_running_loop()
        self.dead: asyncio.Future[str] = self._loop.create_future()
        self._cluster = cluster
        self._actor: Any = None
        self._pidfd = -1
        self._killed, self._unavailable = False, ""
        self._ids = itertools.count(1)
        self._waiting: set[asyncio.Future[Any]] = set()
        self._inboxes: dict[int, Inbox] = {}

    # ------------------------------------------------------------ commands

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        if method == PING:
            return await self._ping(timeout_s)
        return await self._answer(
            method, "call", self.epoch, method, self._pickled(method, args), timeout_s=timeout_s
        )

    def call_then(self, method: str, *args: Any, done: Done) -> None:
        self._refuse_dead(method)
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.add(answer)
        answer.add_done_callback(partial(self._deliver, method, done))
        self._answer_with(self._actor.call.remote(self.epoch, method, self._pickled(method, args)), answer)

    def _deliver(self, method: str, done: Done, answer: asyncio.Future[Any]) -> None:
        self._waiting.discard(answer)
        error = answer.exception()
        if error is None:
            value, error = self._outcome(method, answer.result())
            return done(value, error if isinstance(error, Exception) else None)
        if isinstance(error, self._cluster.actor_errors):
            self._lived(None, error)
            self.dead.add_done_callback(
                lambda dead: done(None, died(self.name, self.epoch, method, dead.result()))
            )
        elif isinstance(error, _Dead):
            done(None, died(self.name, self.epoch, method, str(error)))
        else:
            done(
                None, RemoteError(f"{where(self.name, self.epoch, method)}: {type(error).__name__}: {error}")
            )

    async def stream(self, method: str, *args: Any) -> AsyncGenerator[Any, None]:
        stream, inbox = next(self._ids), Inbox()
        pickled = self._pickled(method, args)
        self._inboxes[stream] = inbox
        complete = False
        try:
            await self._answer(method, "open", self.epoch, stream, method, pickled, timeout_s=None)
            self._pull(stream, inbox, method)
            for num_taken in itertools.count(1):
                message = await inbox.get()
                if message is None:
                    complete = True
                    return
                item, error = message
                if error is not None:
                    raise error
                if num_taken % CREDIT_STEP == 0:
                    self._submit("grant", stream, CREDIT_STEP)
                yield item
        finally:
            del self._inboxes[stream]
            if not complete:
                self._submit("close", stream)

    def dump_stacks(self) -> None:
        """The worker writes the stacks of its threads into its log."""
        self._submit("dump_stacks")

    def kill(self) -> None:
        """Kill the worker through Ray. If the worker lives on and its host can be reached, send a signal."""
        if self._killed or self.dead.done():
            return
        self._killed = True
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        if self._actor is not None:
            in_thread(self._cluster.kill, self._actor)
        self._loop.call_later(STRAY_S, self._kill_stray)
        self._loop.call_later(KILL_S, self._report_death, "killed; its host has not confirmed it")

    # ------------------------------------------------------------ the runtime's part

    async def start(self, setup: ActorSetup) -> None:
        """Make the actor, and set its process up as `setup` says. Raises: WorkerDied."""
        making = in_thread(self._cluster.make_actor, self._namespace, self.name, self.epoch, self.node)
        await asyncio.wait({making, self.dead}, return_when=asyncio.FIRST_COMPLETED)
        self._refuse_dead("its start")
        self._actor = making.result()
        self._then(self._actor.live.remote(), self._lived)
        self._actor.lease.remote()
        self._actor.look_at_log.remote()
        self.pid = await self._result("its start", self._actor.begin.remote(setup))
        if self.node == self._cluster.here:
            with suppress(ProcessLookupError):
                self._pidfd = os.pidfd_open(self.pid)
        if self._killed:
            self._killed = False
            self.kill()

    def lost(self, cause: str) -> None:
        """Nobody can reach the worker any more. Its lease ends the worker."""
        self._killed = True
        self._report_death(cause)

    async def rendezvous(self, address: str) -> str:
        """Rank 0 only: where the ranks of its gang meet. Ranks on several nodes meet at a port of
        `address`."""
        return str(await self._result("its start", self._actor.rendezvous.remote(address)))

    async def construct(
        self, target: str, kwargs: Mapping[str, Any], variables: Mapping[str, str], answer_s: float | None
    ) -> None:
        """Make the worker's object. There is no time limit while the worker answers pings within `answer_s`
        (None: no pings). Raises: as `call`."""
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch(answer_s), name=f"{self.name}.construct")
                pickled = self._pickled(target, dict(kwargs))
                await self._answer(
                    target, "construct", self.epoch, target, dict(variables), pickled, timeout_s=None
                )
                watch.cancel()
                await asyncio.wait([watch])  # see `GangHandle.start`: what fails now must fail in the group
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _watch(self, answer_s: float | None) -> None:
        while answer_s is not None:
            await self.call(PING, timeout_s=answer_s)
            await asyncio.sleep(answer_s / 3)

    async def end(self) -> None:
        """Kill the worker and wait until the worker counts as dead."""
        if self._actor is None:
            self._report_death("never started")
        self.kill()
        await asyncio.wait([self.dead], timeout=2 * KILL_S)

    # ------------------------------------------------------------ messages

    async def _ping(self, timeout_s: float) -> Any:
        try:
            vitals = await self._answer(PING, "ping", self.epoch, timeout_s=timeout_s)
        except TimeoutError:
            self._look_whether_suspended()
            raise
        self.suspended = False
        return vitals

    async def _answer(self, method: str, command: str, *args: Any, timeout_s: float | None) -> Any:
        """Raises: what the worker raised; WorkerDied; DeadlineExceeded."""
        self._refuse_dead(method)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                answer: Answer = await self._result(method, getattr(self._actor, command).remote(*args))
                value, error = self._outcome(method, answer)
                await self._items_before(answer)
        except TimeoutError:
            if limit.expired() and timeout_s is not None:
                raise late(self.name, self.epoch, method, timeout_s) from None
            raise
        if error is not None:
            raise error
        return value

    async def _result(self, method: str, ref: Any) -> Any:
        """The value of `ref`. Raises: as `_answer`, without a deadline."""
        self._refuse_dead(method)
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.add(answer)

        self._answer_with(ref, answer)
        try:
            return await answer
        except MillraceError:
            raise
        except self._cluster.actor_errors as error:
            self._lived(None, error)
            cause = await asyncio.shield(self.dead)
            raise died(self.name, self.epoch, method, cause) from None
        except _Dead as error:
            raise died(self.name, self.epoch, method, str(error)) from None
        except Exception as error:
            raise RemoteError(
                f"{where(self.name, self.epoch, method)}: {type(error).__name__}: {error}"
            ) from error
        finally:
            self._waiting.discard(answer)

    def _answer_with(self, ref: Any, answer: asyncio.Future[Any]) -> None:
        def deliver(value: Any, error: BaseException | None) -> None:
            if not answer.done():
                answer.set_result(value) if error is None else answer.set_exception(error)

        self._then(ref, deliver)

    async def _items_before(self, answer: Answer) -> None:
        """Wait until the inboxes have the items that the worker yielded before `answer`."""
        for stream, num_items in answer.before.items():
            if inbox := self._inboxes.get(stream):
                arrived: asyncio.Future[None] = self._loop.create_future()
                inbox.after(num_items, partial(_set, arrived))
                await arrived
        if answer.before:
            await asyncio.sleep(0)  # consumers of items from this same turn of the loop run first

    def _pull(self, stream: int, inbox: Inbox, method: str) -> None:
        """Fetch until the stream is complete or the worker is dead, also items that nobody wants any more."""

        def put(fetched: tuple[list[Answer], bool] | None, error: BaseException | None) -> None:
            if fetched is None:
                if isinstance(error, self._cluster.actor_errors):
                    self._lived(None, error)
                else:
                    inbox.put(None, RemoteError(f"{where(self.name, self.epoch, method)}: {error!r}"))
                return
            answers, complete = fetched
            for answer in answers:
                inbox.put(*self._outcome(method, answer))
            if complete:
                inbox.end()
            elif not self.dead.done():
                self._pull(stream, inbox, method)

        self._then(self._actor.pull.remote(stream), put)

    def _submit(self, command: str, *args: Any) -> None:
        """A command whose answer nobody waits for."""
        if self._actor is not None and not self.dead.done():
            getattr(self._actor, command).remote(*args)

    def _then(self, ref: Any, then: Callable[[Any, BaseException | None], None]) -> None:
        """Call `then` on the loop, with the value or the error of `ref`."""

        def done(future: Any) -> None:
            error = future.exception()
            value = None if error is not None else future.result()
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(then, value, error)

        ref.future().add_done_callback(done)

    def _pickled(self, method: str, value: Any) -> bytes:
        try:
            return packed(value)
        except Exception as error:
            place = where(self.name, self.epoch, method)
            raise DataError(
                f"{place}: arguments cannot be pickled: {type(error).__name__}: {error}"
            ) from error

    def _outcome(self, method: str, answer: Answer) -> tuple[Any, BaseException | None]:
        """The value, or the error."""
        try:
            value = unpacked(answer.payload)
        except Exception as error:
            place = where(self.name, self.epoch, method)
            return None, RemoteError(f"{place}: cannot unpickle what it sent: {error!r}")
        return (value, None) if answer.ok else (None, value)

    # ------------------------------------------------------------ the end

    def _refuse_dead(self, method: str) -> None:
        if self.dead.done():
            raise died(self.name, self.epoch, method, self.dead.result())

    def _lived(self, _: Any, error: BaseException | None) -> None:
        if isinstance(error, self._cluster.unavailable):
            if not self._killed:
                self._unavailable = f"{_cause(str(error))}; "
            self.kill()  # a worker that was cut off for a moment may have lost commands
            return
        self._report_death("killed" if self._killed else _cause(str(error)))

    def _report_death(self, cause: str) -> None:
        if self.dead.done():
            return
        cause = self._unavailable + cause
        self.dead.set_result(cause)
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(_Dead(cause))
        for inbox in self._inboxes.values():
            inbox.put(None, died(self.name, self.epoch, "a stream", cause))
            inbox.end()

    def _kill_stray(self) -> None:
        if not self.dead.done() and self.pid is not None:
            in_thread(self._cluster.signal, self.node, self.pid, signal.SIGKILL)

    def _look_whether_suspended(self) -> None:
        if self.pid is None:
            return
        if self.node == self._cluster.here:
            self.suspended = process.stopped(self.pid)


class _Dead(Exception):
    """This incarnation is gone."""


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _cause(message: str) -> str:
    """Ray's words, without its advice."""
    match = re.search(
        r"The actor (?:is dead because|died because|never ran -) (.*?)(?: Some common causes|\n|$)", message
    )
    return f"Ray: {match[1] if match else message.splitlines()[0]}"
