"""A simulated replica: the shell around a `Decoder` that gives it time, reports and weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from millrace.core import clock
from millrace.core.errors import DigestMismatchError, TornVersionError, UnknownVersionError
from millrace.core.types import Endpoint, Progress, Report, Served, Work
from millrace.sim.costs import CostModel, Costs
from millrace.sim.decode import Decoder
from millrace.sim.faults import pace
from millrace.sim.workload import Workload
from millrace.sim.world import World

ROUNDING_S = 1e-6
"""Behind a computed instant, so that what was to happen has happened."""
QUIET_REPORT_S = 1.0
"""A replica with nothing to do reports this often, or with every report of a busy one if those are rarer."""


class SimReplica:
    """One engine's worth of simulated decoding. One timer per report, none per token.

    `progress_interval_s`: how often reports tell of unfinished trajectories; None: each does.
    `completions_at_once`: a completion is reported when it happens, as real replicas do; else with the next
    report.
    """

    def __init__(
        self,
        world: World,
        *,
        slots: int,
        kv_capacity_tokens: int,
        report_interval_s: float = 0.1,
        progress_interval_s: float | None = None,
        completions_at_once: bool = False,
        paged: bool = False,
        costs: CostModel = Costs(),
        workload: Workload = Workload(),
    ) -> None:
        self._world, self._costs = world, costs
        self._report_interval_s = report_interval_s
        self._completions_at_once = completions_at_once
        self._progress_interval_s, self._told_s = progress_interval_s or 0.0, 0.0
        self._decoder = Decoder(
            slots=slots, kv_capacity_tokens=kv_capacity_tokens, costs=costs, workload=workload, paged=paged
        )
        self._digest = ""
        self._pulling = asyncio.Lock()
        self._submitted = asyncio.Event()

    async def reports(self) -> AsyncIterator[Report]:
        while True:
            await self._until_report()
            now_s = clock.now()
            unfinished = now_s >= self._told_s + self._progress_interval_s
            self._told_s = now_s if unfinished else self._told_s
            progress = self._decoder.collect(now_s, pace.get()(), unfinished=unfinished)
            yield Report(progress, self._decoder.load())

    async def _until_report(self) -> None:
        if self._decoder.quiet:
            self._submitted.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, QUIET_REPORT_S - self._report_interval_s)):
                    await self._submitted.wait()
        await asyncio.sleep(self._until_next_s())

    def _until_next_s(self) -> float:
        if not self._completions_at_once:
            return self._report_interval_s
        until_s = self._decoder.completes_s(pace.get()()) - clock.now()
        return min(self._report_interval_s, max(0.0, until_s) + ROUNDING_S)

    async def submit(self, works: list[Work]) -> None:
        self._decoder.submit(works, clock.now(), pace.get()())
        self._submitted.set()

    async def release(self, trajectory_ids: list[int]) -> list[Progress]:
        return self._decoder.release(trajectory_ids, clock.now(), pace.get()())

    async def pull(self, version: int, endpoint: Endpoint) -> Served:
        async with self._pulling:
            if version == self._decoder.version:
                return Served(version, self._digest, pull_s=0.0, swap_s=0.0)
            started = clock.now()
            digest = await self._copy(version, endpoint)
            pulled = clock.now()
            swapped = self._decoder.swap(version, pulled, pace.get()())
            self._digest = digest
            await asyncio.sleep(swapped - pulled)
            return Served(version, digest, pull_s=pulled - started, swap_s=swapped - pulled)

    async def _copy(self, version: int, endpoint: Endpoint) -> str:
        """Read a slot that may be overwritten meanwhile."""
        staged = self._world.shelf(endpoint.path).staged(version)
        await asyncio.sleep(self._costs.pull_s * pace.get()())
        try:
            copied = self._world.read(self._world.shelf(endpoint.path).staged(version))
        except UnknownVersionError as error:
            raise TornVersionError(f"version {version} was overwritten while it was read: {error}") from error
        if copied != staged:
            raise DigestMismatchError(f"version {version}: the copy is {copied}, the slot held {staged}")
        return copied
