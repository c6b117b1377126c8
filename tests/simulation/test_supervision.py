"""Supervision: what ends it, and what does not."""

from __future__ import annotations

import asyncio

import millrace_sim
from millrace.config.tables.operation import Supervision
from millrace.controller.patience import Patience
from millrace.controller.supervisor import Supervisor, WorkerSpec
from millrace.controller.waits import Waits
from millrace.core import clock
from millrace.core.errors import WorkerDied
from millrace.core.events import Events
from millrace.core.protocols import Handle
from millrace_sim.virtual.sim_runtime import SimRuntime

POLICY = Supervision(
    heartbeat_timeout_s=4.0, restarts=5, restart_window_s=100.0, backoff_s=0.1, spawn_timeout_s=10
)
SPEC = WorkerSpec("probe", "probe", "millrace.runtime.probe:Probe")


def test_a_cancel_in_the_moment_of_a_death_ends_supervision() -> None:
    async def session(handle: Handle) -> None:
        try:
            await asyncio.sleep(1000.0)
        except asyncio.CancelledError:
            raise WorkerDied("in the same moment") from None

    async def main() -> int:
        runtime = SimRuntime(0)
        supervisor = Supervisor(
            runtime, Events(clock.now, clock.wall), POLICY, Waits(), Patience(600.0).on_heartbeat
        )
        async with asyncio.TaskGroup() as group:
            task = group.create_task(supervisor.keep(SPEC, session))
            await asyncio.sleep(1.0)
            task.cancel()
        await runtime.close()
        return supervisor.restarts

    assert millrace_sim.run(main(), seed=0, time_max_s=100.0) == 0
