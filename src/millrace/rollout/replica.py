"""The replica: one engine, of whatever kind, as a passive role. On a device that is lent in shifts it begins
asleep.

Every call of the engine runs on one worker thread, in order. So commands fall between two steps and need no
lock, and the event loop answers while a step computes. The stream of reports drives the engine: the engine
generates as long as the controller listens. Pulls copy and digest on a second thread while steps go on. The
swap falls between two steps. Reports go on while a swap or a digest occupies the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

import msgspec

from millrace.config.objects import find_object
from millrace.core.errors import (
    ConfigError,
    DigestMismatchError,
    WeightsError,
    WorkerError,
    boundary,
    needing_memory,
)
from millrace.core.progress import CallProgress, current, of, waiting_for
from millrace.core.protocols import WeightsReader
from millrace.core.types import Endpoint, Progress, ReplicaLoad, Report, Served, Work
from millrace.devices.served_weights import Merging
from millrace.rollout.engine_kinds import open_engine
from millrace.rollout.protocol import EngineOptions
from millrace.rollout.sampling_probe import SamplingProbe

T = TypeVar("T")
OpenReader = Callable[[Endpoint], WeightsReader]

# An idle replica reports so often, or in its interval if that is longer: large fleets have long ones.
_HEARTBEAT_S = 0.5
# The fraction of a replica's time that rechecks of the served digest may take.
_RECHECK_FRACTION = 0.01
# A command waits for at most this long, and for the running step. A shorter slice wastes time on hand-overs.
_SLICE_S = 0.02


class EngineReplica:
    """Serves the architecture of `options.model_path`; its weights come from the relay only.

    Args:
        engine: see `rollout.engine_kinds.ENGINES`.
        early_interval_s: between two reports of what has ended, while trajectories wait for a slot.
        open_reader: "package.module:function" that opens a WeightsReader on an Endpoint.
    """

    def __init__(
        self,
        name: str,
        engine: str,
        options: EngineOptions,
        *,
        report_interval_s: float,
        early_interval_s: float = 0.0,
        open_reader: str,
    ) -> None:
        self._name = name
        self._report_interval_s, self._due_s = report_interval_s, 0.0
        self._early_interval_s, self._early_due_s = early_interval_s, 0.0
        self._heartbeat_s = max(_HEARTBEAT_S, report_interval_s)
        with boundary(name, f"import `open_reader` ({open_reader})", ConfigError):
            self._open_reader: OpenReader = find_object(open_reader, "`open_reader`")[0]
        self._readers: dict[Endpoint, WeightsReader] = {}
        scale = options.adapter_scale
        self._merging = None if scale is None else Merging(options.model_path, options.dtype, scale)
        self._advice = (
            f"Lower `rollout.slots` ({options.slots}), `rollout.max_sequence_tokens` "
            f"({options.max_sequence_tokens}) or `rollout.prefill_chunk` ({options.prefill_chunk}), "
            "or free memory"
        )
        with needing_memory(name, "two sets of weights and the cache of keys and values", self._advice):
            self._engine = open_engine(engine, options)
        self._engine_thread = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-engine")
        self._pull_thread = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-pull")
        self._probe = SamplingProbe(name, engine, self._engine, options)
        self._digest = ""  # of the served version
        self._recheck_due_s = float("inf")
        self._wake = asyncio.Event()
        self._pulling = asyncio.Lock()
        self._at_engine = CallProgress()  # of the work on the engine's thread, for which commands wait
        self._occupied = False  # by a swap, or by a digest that was asked for
        self._driven: asyncio.Future[None] | None = None  # by the stream: a slice, or a recheck
        self._leaving = False
        self._started_s, self._busy_s = time.monotonic(), 0.0
        self._load = self._measured_load()

    # ------------------------------------------------------------ commands

    def notice(self) -> None:
        """The host goes away soon. Reports ask the controller to take the trajectories in flight back."""
        self._leaving, self._due_s = True, 0.0
        self._wake.set()

    async def submit(self, works: list[Work]) -> None:
        with waiting_for(self._at_engine):
            await self._on(self._engine_thread, lambda: self._engine.submit(works))
        self._wake.set()

    async def release(self, trajectory_ids: list[int]) -> list[Progress]:
        with waiting_for(self._at_engine):
            return await self._on(self._engine_thread, lambda: self._engine.release(trajectory_ids))

    async def pull(self, version: int, endpoint: Endpoint) -> Served:
        async with self._pulling:
            if version == self._engine.version:
                digest = await self._alone(self._engine.digest)
                return Served(version, self._published(digest), 0.0, 0.0, self._engine.computes)
            started_s = time.monotonic()
            digest = await self._on(self._pull_thread, lambda: self._stage(version, endpoint))
            pulled_s = time.monotonic()
            await self._alone(lambda: self._swap(version, digest, pulled_s - started_s))
            swap_s, published = time.monotonic() - pulled_s, self._published(digest)
            return Served(version, published, pulled_s - started_s, swap_s, self._engine.computes)

    # ------------------------------------------------------------ the stream

    async def reports(self) -> AsyncIterator[Report]:
        """Drive the engine. Consumes submitted work; waits for the running slice, for work, or for the next
        heartbeat; unblocked by submit and pull; ends when the consumer closes it.

        Raises: DigestMismatchError: the served weights changed in memory. WeightsError: a logit is not
        finite."""
        while True:
            yield await self._next_report()

    async def _next_report(self) -> Report:
        """Run slices until the interval is over or something finished; heartbeats in between. Within the
        interval a report has only what finished. In a large fleet, which has long intervals, more may finish
        before such a report leaves, as long as no slot is empty meanwhile."""
        loop = asyncio.get_running_loop()
        while True:
            if self._driven is None and not await self._something_to_do():
                return Report([], self._load if self._occupied else self._measured_load(), self._leaving)
            running = self._driven = self._driven or loop.run_in_executor(self._engine_thread, self._drive)
            await asyncio.wait({running}, timeout=self._heartbeat_s)
            if not running.done():
                return Report([], self._load, self._leaving)
            if self._driven is running:  # an earlier stream that is still being closed may have taken it
                self._driven = None
            running.result()
            now_s = time.monotonic()
            is_due = now_s >= self._due_s
            gathers = self._engine.has_work and self._load.waiting and now_s < self._early_due_s
            if (is_due or (self._engine.has_finished and not gathers)) and not self._occupied:
                self._due_s = now_s + self._report_interval_s if is_due else self._due_s
                self._early_due_s = now_s + self._early_interval_s
                return await self._on(self._engine_thread, partial(self._take_report, ended=not is_due))

    async def _something_to_do(self) -> bool:
        self._wake.clear()
        if not self._has_something_to_do():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._heartbeat_s)
            if time.monotonic() < self._recheck_due_s:  # else rechecks would put the next report off for ever
                self._due_s = time.monotonic() + self._report_interval_s
        return self._has_something_to_do()

    def _has_something_to_do(self) -> bool:
        due = self._engine.has_work or self._engine.has_finished or time.monotonic() >= self._recheck_due_s
        return due and not self._occupied

    # ------------------------------------------------------------ on the engine thread

    def _drive(self) -> None:
        with of(self._at_engine):
            self._recheck() if time.monotonic() >= self._recheck_due_s else self._run_slice()

    def _run_slice(self) -> None:
        """Steps for `_SLICE_S`. Trajectories that finish meanwhile are reported together at the end: a
        hand-over for each would cost more than the wait."""
        started_s = time.monotonic()
        end_s = started_s + _SLICE_S
        with needing_memory(self._name, f"a step of {self._load.running} trajectories", self._advice):
            while self._engine.has_work:
                self._engine.step()
                self._at_engine.count()
                if time.monotonic() >= end_s:
                    break
        self._busy_s += time.monotonic() - started_s
        self._load = self._measured_load()

    def _take_report(self, *, ended: bool) -> Report:
        return Report(self._engine.take_progress(ended=ended), self._measured_load(), self._leaving)

    def _measured_load(self) -> ReplicaLoad:
        idle_s = time.monotonic() - self._started_s - self._busy_s
        load = self._probe.left_out_of(self._engine.load())
        return msgspec.structs.replace(load, busy_s=self._busy_s, idle_s=idle_s)

    def _recheck(self) -> None:
        """Digest the served weights once more, so rarely that digests take 1 % of the time."""
        version, started_s = self._engine.version, time.monotonic()
        if version < 0:
            self._recheck_due_s = float("inf")
            return
        digest = self._engine.digest()
        if digest != self._digest:
            raise DigestMismatchError(
                f"replica {self._name}: version {version} changed in memory while it was served: its digest "
                f"was {self._digest} and is {digest}.\n  What was sampled since is suspect: test the "
                "machine's memory, then go back with `--resume --from-version` to a version before it"
            )
        self._recheck_after(time.monotonic() - started_s)

    def _recheck_after(self, took_s: float) -> None:
        """`took_s`: how long one digest takes."""
        self._recheck_due_s = time.monotonic() + took_s / _RECHECK_FRACTION

    def _swap(self, version: int, digest: str, took_s: float) -> None:
        self._engine.swap(version)
        with needing_memory(self._name, "a step of its first trajectories, a probe", self._advice):
            self._probe.once()
        self._digest = digest
        self._load = self._measured_load()
        self._recheck_after(took_s)

    # ------------------------------------------------------------ on the pull thread

    def _stage(self, version: int, endpoint: Endpoint) -> str:
        """Stage the version while the engine goes on. Returns its digest here."""
        with boundary(f"replica {self._name}", f"pulling version {version}", WeightsError):
            staged_digest, digest = self._engine.stage(version, self._reader(endpoint))
        if digest != staged_digest:
            raise DigestMismatchError(
                f"replica {self._name}: version {version} was staged with digest {staged_digest}, but "
                f"the engine holds {digest}. Nothing was sampled under it; the run must stop."
            )
        return digest

    def _published(self, digest: str) -> str:
        """The digest under which the relay has the version that has `digest` here."""
        return digest if self._merging is None else self._merging.published(digest)

    def _reader(self, endpoint: Endpoint) -> WeightsReader:
        """The reader of `endpoint`. Opening another endpoint (a restarted relay) closes the last reader."""
        if endpoint not in self._readers:
            while self._readers:
                self._readers.popitem()[1].close()
            opened = self._open_reader(endpoint)
            self._readers[endpoint] = opened if self._merging is None else self._merging.over(opened)
        return self._readers[endpoint]

    async def _alone(self, work: Callable[[], T]) -> T:
        """Long work on the engine's thread: the stream waits for its end, and other commands wait for the
        call under way. A report's tokens are taken before it or after it."""
        self._occupied = True
        try:
            with self._at_engine.waiting_for(current()):
                return await self._on(self._engine_thread, work)
        finally:
            self._occupied = False
            self._wake.set()

    @staticmethod
    async def _on(thread: ThreadPoolExecutor, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(thread, copy_context().run, function)


# ---------------------------------------------------------------- on a device that is lent in shifts


class SharedReplica(EngineReplica):
    """Arguments: as of `EngineReplica`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._asleep = True
        self._engine.sleep()

    async def sleep(self) -> None:
        async with self._pulling:
            self._asleep = True
            await self._alone(self._drop)

    async def wake(self) -> None:
        with needing_memory(self._name, "its weights and its cache, at waking", self._advice):
            await self._alone(self._engine.wake)
        self._asleep = False

    async def pull(self, version: int, endpoint: Endpoint) -> Served:
        if self._asleep:
            raise WorkerError(f"{self._name} is asleep: `wake` must come first")
        return await super().pull(version, endpoint)

    def _drop(self) -> None:
        """On the engine's thread."""
        self._engine.sleep()
        self._recheck_due_s = float("inf")
        self._load = self._measured_load()


class Sleepless:
    """Of an engine without `rollout.colocated` in its settings."""

    def sleep(self) -> None:
        raise WorkerError(f"{type(self).__name__} cannot sleep: `rollout.colocated` needs another engine")

    def wake(self) -> None:
        """It is awake."""
