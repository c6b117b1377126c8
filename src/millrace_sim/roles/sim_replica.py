"""A simulated replica: a shell that gives a `BatchingEngine` time, reports and weights."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import suppress

from millrace.core import clock
from millrace.core.errors import DigestMismatchError, TornVersionError, UnknownVersionError, WorkerError
from millrace.core.types import Endpoint, Progress, Report, Served, Work
from millrace_sim.costs.interface import CostModel, Costs
from millrace_sim.costs.workload import Workload
from millrace_sim.roles.batching import BatchingEngine
from millrace_sim.roles.world import World
from millrace_sim.virtual.faults import pace

ROUNDING_S = 1e-6
"""Added to a computed time, so that everything due at that time has happened."""
QUIET_REPORT_S = 1.0
"""Interval between reports of an idle replica, or the interval of a busy replica if that is longer."""


class SimReplica:
    """A replica with one simulated engine. It needs one timer per report, none per token.

    `progress_interval_s`: the interval between reports with unfinished trajectories; None: each report has
    them. `slice_s`: decode in slices of this length, as real replicas do. Commands take effect between two
    slices. Completions are reported at the end of a slice, whose speed is fixed at its beginning. 0: commands
    take effect at once, and completions are in the next report.
    """

    def __init__(
        self,
        world: World,
        *,
        slots: int,
        kv_capacity_tokens: int,
        keep_kv: bool,
        report_interval_s: float = 0.1,
        progress_interval_s: float | None = None,
        slice_s: float = 0.0,
        paged: bool = False,
        costs: CostModel = Costs(),
        workload: Workload = Workload(),
        asleep: bool = False,
    ) -> None:
        self._world, self._costs, self._asleep = world, costs, asleep
        self._report_interval_s = report_interval_s
        self._slice_s, self._contention = slice_s, 1.0
        self._between_slices = asyncio.Event()
        self._between_slices.set()
        self._progress_interval_s, self._progress_s = progress_interval_s or 0.0, 0.0
        self._engine = BatchingEngine(
            slots=slots,
            kv_capacity_tokens=kv_capacity_tokens,
            costs=costs,
            workload=workload,
            paged=paged,
            keep_kv=keep_kv,
        )
        self._digest = ""
        self._pulling = asyncio.Lock()
        self._submitted = asyncio.Event()
        self._leaving = False

    def notice(self) -> None:
        """The replica learns that its host goes away."""
        self._leaving = True
        self._submitted.set()

    async def reports(self) -> AsyncIterator[Report]:
        while True:
            await self._until_report()
            now_s = clock.now()
            unfinished = now_s >= self._progress_s + self._progress_interval_s
            self._progress_s = now_s if unfinished else self._progress_s
            progress = self._engine.collect(now_s, self._slowdown(), unfinished=unfinished)
            if progress:
                await self._hand_over()
            yield Report(progress, self._engine.load(), self._leaving)

    async def _hand_over(self) -> None:
        """A report with news is written; nothing decodes meanwhile."""
        if self._costs.handover_s:
            handover_s = self._costs.handover_s * pace.get()()
            self._engine.stall(handover_s)
            await asyncio.sleep(handover_s)

    async def _until_report(self) -> None:
        if self._engine.quiet:
            self._submitted.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, QUIET_REPORT_S - self._report_interval_s)):
                    await self._submitted.wait()
        if self._slice_s:
            await self._slices()
        else:
            await asyncio.sleep(self._report_interval_s)

    async def _slices(self) -> None:
        """Until a report is due at the end of a slice, or something has completed."""
        due_s = clock.now() + self._report_interval_s
        while True:
            self._between_slices.clear()
            try:
                await self._slice()
            finally:
                self._between_slices.set()
            if self._engine.has_finished or clock.now() >= due_s:
                return
            if not self._engine.decoding:
                await asyncio.sleep(due_s - clock.now())
                return

    async def _slice(self) -> None:
        """Ends early if nothing is left to decode."""
        self._engine.advance(clock.now(), self._slowdown())
        self._contention = self._costs.contention if self._world.training else 1.0
        end_s = clock.now() + self._slice_s
        while (now_s := clock.now()) < end_s:
            self._engine.advance(now_s, self._slowdown())
            completes_s = self._engine.completes_s(self._slowdown())
            if completes_s == math.inf:
                return
            await asyncio.sleep(min(end_s - now_s, max(0.0, completes_s - now_s) + ROUNDING_S))

    async def submit(self, works: list[Work]) -> None:
        await self._between_slices.wait()
        self._engine.submit(works, clock.now(), self._slowdown())
        self._submitted.set()

    async def release(self, trajectory_ids: list[int]) -> list[Progress]:
        await self._between_slices.wait()
        return self._engine.release(trajectory_ids, clock.now(), self._slowdown())

    async def pull(self, version: int, endpoint: Endpoint) -> Served:
        async with self._pulling:
            if self._asleep:
                raise WorkerError("the replica is asleep: `wake` must come first")
            if version == self._engine.version:
                return Served(version, self._digest, pull_s=0.0, swap_s=0.0)
            started = clock.now()
            digest = await self._copy(version, endpoint)
            read_s = clock.now() - started
            await self._between_slices.wait()
            pulled = clock.now()
            swapped = self._engine.swap(version, pulled, self._slowdown())
            self._digest = digest
            await asyncio.sleep(swapped - pulled)
            return Served(version, digest, pull_s=read_s, swap_s=swapped - pulled)

    async def sleep(self) -> None:
        async with self._pulling:
            await self._between_slices.wait()
            if not self._asleep:
                self._engine.sleep(clock.now(), self._slowdown())
            self._asleep = True
            self._world.release(self)

    async def wake(self) -> None:
        self._world.hold(self, "rollout")
        self._asleep = False

    def reclaim(self) -> None:
        """Its process is dead."""
        self._world.release(self)

    def _slowdown(self) -> float:
        return pace.get()() * self._contention

    async def _copy(self, version: int, endpoint: Endpoint) -> str:
        """Read a slot that may be overwritten meanwhile."""
        staged = self._world.slots_at(endpoint.path).staged(version)
        await asyncio.sleep(self._costs.pull_s * pace.get()())
        try:
            copied = self._world.read(self._world.slots_at(endpoint.path).staged(version))
        except UnknownVersionError as error:
            raise TornVersionError(f"version {version} was overwritten while it was read: {error}") from error
        if copied != staged:
            raise DigestMismatchError(f"version {version}: the copy is {copied}, the slot held {staged}")
        return copied
