"""The environment pool, when one of its workers dies."""

from __future__ import annotations

import asyncio

import pytest

from millrace import sim
from millrace.controller.environment_pool import EnvironmentPool
from millrace.controller.pulse import Pulse, Waits
from millrace.core import clock
from millrace.core.errors import WorkerDied
from millrace.core.types import Prompt


class Dies:
    name = "environment-0"

    async def call(self, method, group_ids, *, timeout_s):
        await asyncio.sleep(1.0)
        raise WorkerDied(self.name)


class Serves:
    name = "environment-1"

    async def call(self, method, group_ids, *, timeout_s):
        return [Prompt(group_id, "row", [1], "text") for group_id in group_ids]


def test_prompts_that_a_dying_worker_was_asked_for_come_from_another_at_once():
    async def main():
        news = Pulse()
        pool = EnvironmentPool(news, Waits(), lambda *score: None, next_group_id=0, prefetch=4, timeout_s=9.0)
        async with asyncio.TaskGroup() as group:
            dying = group.create_task(_until_dead(pool))
            await asyncio.sleep(0.1)
            other = group.create_task(pool.session(Serves()))
            await news.wait(timeout_s=100.0)
            other.cancel()
            await dying
        return clock.now(), pool.next_prompt().group_id

    async def _until_dead(pool):
        with pytest.raises(WorkerDied):
            await pool.session(Dies())

    assert sim.run(main(), seed=0) == (1.0, 0)
