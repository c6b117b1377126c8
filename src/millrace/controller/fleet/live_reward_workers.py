"""The reward workers of a run while it goes on: as many as their queue needs.

    needed = busy workers + waiting completions x seconds of a score / DRAIN_S

The number stays between `reward.workers` and `reward.workers_max`. More workers start at once. Workers end
after `QUIET_S` seconds in which fewer were needed all the time. No worker ends while it scores.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import ceil

from millrace.controller.context import RunContext
from millrace.controller.fault import may_go_on_without
from millrace.controller.supervisor import Supervisor, WorkerSpec
from millrace.core import clock
from millrace.core.errors import MillraceError

DRAIN_S = 2.0
"""Waiting completions should be scored within this time. The start of a worker takes as long."""
QUIET_S = 30.0
LOOK_S = 0.5


class RewardWorkersNeeded:
    """The decision. Pure: the time is an argument."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self.most = least, most
        self.num = least
        self._peak, self._since_s = least, 0.0  # the most that were needed since `_since_s`

    def look(self, *, busy: int, waiting: int, score_s: float, now_s: float) -> int:
        """How many workers there shall be, with `busy` workers and `waiting` completions."""
        needed = min(self.most, max(self._least, busy + ceil(waiting * score_s / DRAIN_S)))
        self._peak = max(self._peak, needed)
        if needed > self.num or now_s - self._since_s >= QUIET_S:
            self.num, self._peak, self._since_s = self._peak, needed, now_s
        return self.num


class LiveRewardWorkers:
    """`specs`: all workers that there may be. The first `least` of them start with the run."""

    def __init__(
        self, run: RunContext, specs: Sequence[WorkerSpec], supervisor: Supervisor, *, least: int
    ) -> None:
        self._run, self._specs, self._supervisor = run, list(specs), supervisor
        self._least = min(least, len(specs))
        self._first = frozenset(spec.name for spec in specs[: self._least])
        self._needed = RewardWorkersNeeded(self._least, len(specs))
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(self, group: asyncio.TaskGroup) -> None:
        """The coroutines of all workers, as members of `group`."""
        self._group = group
        self._start(self._least)
        if len(self._specs) > self._least:
            self._tasks[""] = group.create_task(self._follow(), name="reward workers")

    def end(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def _start(self, num: int) -> None:
        for spec in self._specs[:num]:
            if spec.name not in self._tasks:
                self._tasks[spec.name] = self._group.create_task(self._keep(spec), name=spec.name)

    async def _keep(self, spec: WorkerSpec) -> None:
        """Keep the worker of `spec` alive until it is spare, or the run is over."""
        pool = self._run.pool
        while spec.name not in pool.spare and spec in self._specs:
            try:
                await self._supervisor.keep(
                    spec, pool.session, pool.is_scoring, is_leaving=lambda: spec.name in pool.spare
                )
            except MillraceError as error:
                self._go_on_without(spec, error)
        del self._tasks[spec.name]

    def _go_on_without(self, spec: WorkerSpec, error: MillraceError) -> None:
        """Other workers do the work of `spec`. Raises: `error`, if there are none."""
        run, fruitful = self._run, self._run.waits.fruitful
        first, worked = spec.name in self._first, fruitful(spec.name)
        others = any(fruitful(name) for name in self._tasks if name != spec.name)
        if not may_go_on_without(error, first=first, worked=worked, others=others):
            raise error
        self._specs.remove(spec)
        warning = f"{spec.name} is given up, {len(self._specs)} may be there: {error}"
        run.events.emit("warned", source="reward workers", reason=warning)
        self._needed.most = min(self._needed.most, len(self._specs))
        self._start(self._needed.num)

    async def _follow(self) -> None:
        """Adapts the number of workers to the queue every `LOOK_S`, until the run ends."""
        run, pool = self._run, self._run.pool
        while True:
            await asyncio.sleep(LOOK_S)
            before = self._needed.num
            waiting, score_s = pool.num_requests, pool.score_s
            num = self._needed.look(busy=pool.num_busy, waiting=waiting, score_s=score_s, now_s=clock.now())
            if num != before:
                run.events.emit(
                    "reward_workers", workers=num, before=before, waiting=waiting, score_s=score_s
                )
                pool.spare_all(spec.name for spec in self._specs[num:])
                self._start(num)
