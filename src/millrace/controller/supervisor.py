"""Supervision: one coroutine per worker keeps one incarnation of it alive at a time.

    spawn -> session(handle) until the worker dies or misses a heartbeat -> clean up -> back off -> again

A session is all that the controller does with one incarnation. When the worker dies, the calls and streams
of its session raise `WorkerDied`, so a crash takes the same path as an orderly end.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.config.tables.operation import Supervision
from millrace.controller.fault import is_workers, may_restart, starting
from millrace.controller.waits import Waits
from millrace.core import clock
from millrace.core.errors import DeadlineExceeded, DigestMismatchError, WorkerDied, WorkerError, alone, leaves
from millrace.core.events import Events
from millrace.core.placement import HERE, Place
from millrace.core.progress import Vitals
from millrace.core.protocols import Handle, Runtime

BACKOFF_S_MAX = 10.0
DEATH_GRACE_S = 0.02  # a session in a call learns of the death there, and its error says more


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What to spawn: worker `name` of `role`, an instance of `target` made with `kwargs`, at `place`.
    `spawn_s_max`: a start may take this long, even if the policy's `spawn_timeout_s` is shorter."""

    role: str
    name: str
    target: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    place: Place = HERE
    spawn_s_max: float = 0.0


Session = Callable[[Handle], Awaitable[None]]
Exempt = Callable[[Handle], bool]


class PlannedRestart(WorkerError):
    """The session itself wants a new incarnation. It does not count against the restart budget."""


def never(*_: object) -> bool:
    return False


class Supervisor:
    """`on_heartbeat` judges the vitals that a worker sends with each heartbeat. An error that it raises ends
    that worker."""

    def __init__(
        self,
        runtime: Runtime,
        events: Events,
        policy: Supervision,
        waits: Waits,
        on_heartbeat: Callable[[Handle, Vitals, float], None],
    ) -> None:
        self._runtime, self._events, self._policy, self._waits = runtime, events, policy, waits
        self._on_heartbeat = on_heartbeat
        self._epochs: dict[str, int] = {}  # of the newest incarnation, by worker
        self._resident_bytes: dict[str, int] = {}  # at the last heartbeat, by worker
        self.restarts = 0

    async def keep(
        self,
        spec: WorkerSpec,
        session: Session,
        exempt: Exempt = never,
        is_leaving: Callable[[], bool] = never,
        on_death: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Run `session` on incarnation after incarnation of `spec`. Returns when a session returns, or when
        the worker dies and `is_leaving` says that it was to leave. A worker that is `exempt` may leave a
        heartbeat unanswered: its work has another deadline. `on_death` is awaited after each death, before
        the worker starts again.

        Raises: the worker's error that another start would meet again; WorkerError when the restart budget is
        spent; every error that is not the worker's. See `fault`.
        """
        crashes: deque[float] = deque()
        died_at: float | None = None
        while True:
            try:
                await self._live(spec, session, exempt, died_at)
                return
            except Exception as failures:
                cause = _of_worker(failures)
            _heed_cancel()
            if is_leaving() and not isinstance(cause, DigestMismatchError):
                return
            worked = died_at is not None or self._waits.fruitful(spec.name)
            if not may_restart(cause, spec.role, started=spec.name in self._epochs, worked=worked):
                raise cause
            died_at = clock.now()
            self.restarts += 1
            epoch, reason = self._epochs.get(spec.name, 0), self._reason(spec.name, cause)
            self._events.emit("worker_died", role=spec.role, name=spec.name, epoch=epoch, cause=reason)
            if on_death is not None:
                await on_death()
            if not isinstance(cause, PlannedRestart):
                await self._back_off(spec, crashes, cause)

    async def _live(self, spec: WorkerSpec, session: Session, exempt: Exempt, died_at: float | None) -> None:
        """One incarnation, from spawn to death. It never runs on after this."""
        started = clock.now()
        with starting(spec.name), self._waits.waiting(spec.name, "its start", bounded=True):
            handle = await self._runtime.spawn(
                spec.name,
                spec.target,
                spec.kwargs,
                place=spec.place,
                timeout_s=max(self._policy.spawn_timeout_s, spec.spawn_s_max),
            )
        self._epochs[spec.name] = handle.epoch
        fields = {"role": spec.role, "name": spec.name, "epoch": handle.epoch}
        process = {"pid": getattr(handle, "pid", None)}
        process |= {name: getattr(handle, name) for name in ("pids", "address") if hasattr(handle, name)}
        self._events.emit("worker_started", **fields, **process, spawn_s=clock.now() - started)
        if died_at is not None:
            self._events.emit("worker_recovered", **fields, recovery_s=clock.now() - died_at)
        try:
            async with asyncio.TaskGroup() as group:
                watchers = [
                    group.create_task(_death(handle), name=f"{spec.name}.death"),
                    group.create_task(self._heartbeat(handle, exempt), name=f"{spec.name}.heartbeat"),
                ]
                await session(handle)
                for watcher in watchers:
                    watcher.cancel()
                # A watcher that fails now must fail inside the group. A group that is already closing does
                # not undo its cancellation of this task (Python 3.11).
                await asyncio.wait(watchers)
        finally:
            handle.kill()

    async def _heartbeat(self, handle: Handle, exempt: Exempt) -> None:
        """A worker that does not answer within `heartbeat_timeout_s` is killed. An exempt worker is killed
        only if it is suspended. It then counts as a worker that died at its work."""
        while True:
            await asyncio.sleep(self._policy.heartbeat_timeout_s / 3)
            sent_s, was_exempt = clock.now(), exempt(handle)
            try:
                vitals = await handle.call("__ping__", timeout_s=self._policy.heartbeat_timeout_s)
            except DeadlineExceeded:
                if not (was_exempt or exempt(handle)):
                    raise
                if getattr(handle, "suspended", False):
                    handle.kill()
                continue
            self._resident_bytes[handle.name] = vitals.resident_bytes
            self._on_heartbeat(handle, vitals, sent_s)

    def _reason(self, name: str, cause: BaseException) -> str:
        """The kernel gives no reason when it kills a process for lack of memory; its size is a hint."""
        reason = str(cause)
        if "SIGKILL" not in reason:
            return reason
        resident_bytes = self._resident_bytes.get(name)
        size = f" ({resident_bytes / 1e6:.0f} MB were resident)" if resident_bytes else ""
        return f"{reason}, by somebody or by the kernel for want of memory{size}"

    async def _back_off(self, spec: WorkerSpec, crashes: deque[float], cause: BaseException) -> None:
        policy = self._policy
        crashes.append(clock.now())
        while crashes[0] < crashes[-1] - policy.restart_window_s:
            crashes.popleft()
        if len(crashes) > policy.restarts:
            early = "" if spec.name in self._epochs else ", each time before it was ready"
            raise WorkerError(
                f"{spec.name} died {len(crashes)} times within {policy.restart_window_s:g} s{early}; the "
                f"last time: {self._reason(spec.name, cause)}\n  Its own words are in the run directory, "
                f"logs/{spec.name}.*.log. The budget is `supervision.restarts` ({policy.restarts})."
            ) from cause
        await asyncio.sleep(min(BACKOFF_S_MAX, policy.backoff_s * 2 ** (len(crashes) - 1)))


def _heed_cancel() -> None:
    """A task group that is cancelled at the moment in which a member fails reports only the failure."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _death(handle: Handle) -> None:
    cause = await asyncio.shield(handle.dead)
    await asyncio.sleep(DEATH_GRACE_S)
    raise WorkerDied(f"{handle.name} (epoch {handle.epoch}) {cause}")


def _of_worker(failure: Exception) -> BaseException:
    """The worker's error that explains the others: a death explains the calls that it broke. Raises: an error
    that is not the worker's."""
    if isinstance(failure, ExceptionGroup):
        _, foreign = failure.split(is_workers)
        if foreign is not None:
            raise alone(foreign)
    elif not is_workers(failure):
        raise failure
    errors = list(leaves(failure))
    raised = [e for e in errors if not isinstance(e, WorkerError | DeadlineExceeded)]
    planned = [e for e in errors if isinstance(e, PlannedRestart)]
    deaths = [e for e in errors if isinstance(e, WorkerDied)]
    return (raised or planned or deaths or errors)[0]
