"""A real replica that loads for many deadlines on a loaded machine: its reports and its answers go on."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.long import long

from millrace.config.tables.operation import Supervision
from millrace.controller import patience
from millrace.controller.patience import Patience
from millrace.controller.supervisor import Supervisor, WorkerSpec
from millrace.controller.waits import Waits
from millrace.core import clock
from millrace.core.errors import WorkerError
from millrace.core.events import Events
from millrace.core.protocols import Handle
from millrace.core.types import Endpoint, Report, Served
from millrace.runtime.local.local_runtime import LocalRuntime

LOAD_S = 15.0
FLOOR_S = HEARTBEAT_S = 3.0
POLICY = Supervision(
    heartbeat_timeout_s=HEARTBEAT_S, restarts=0, restart_window_s=60.0, backoff_s=0, spawn_timeout_s=120
)
BUSY = "while True: sum(range(1000))"


@pytest.fixture
def load() -> Iterator[None]:
    burners = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
    yield
    for burner in burners:
        burner.kill()
        burner.wait()


def pulled(monkeypatch: pytest.MonkeyPatch, *, hangs: bool) -> tuple[Served, list[Report]]:
    """The answer to a pull, and the reports until then, with a probe of the engine as a run makes it."""
    monkeypatch.setattr(patience, "FLOOR_S", FLOOR_S)
    monkeypatch.setattr(patience, "CREDIT_S_MAX", FLOOR_S / 2)
    patient, reports, answers = Patience(600.0), list[Report](), list[Served]()

    async def session(handle: Handle) -> None:
        async def listen() -> None:
            async for report in handle.stream("reports"):
                reports.append(report)

        async def probe() -> None:
            while True:
                await asyncio.sleep(HEARTBEAT_S / 2)
                await patient.call(handle, "release", [])

        await patient.call(handle, "release", [])
        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(listen()), group.create_task(probe())]
            answers.append(await patient.call(handle, "pull", 0, Endpoint("none", "", 2, 0)))
            for task in beside:
                task.cancel()

    async def run() -> None:
        runtime = LocalRuntime()
        supervisor = Supervisor(runtime, Events(clock.now, clock.wall), POLICY, Waits(), patient.on_heartbeat)
        kwargs = {"name": "replica-0", "load_s": LOAD_S, "hangs": hangs}
        try:
            async with asyncio.timeout(240.0):
                await supervisor.keep(
                    WorkerSpec("replica", "replica-0", "slow_loads:SlowReplica", kwargs), session
                )
        finally:
            await runtime.close()

    asyncio.run(run())
    return answers[0], reports


@long
def test_a_load_of_many_deadlines_costs_no_replica_and_its_reports_go_on(
    load: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, reports = pulled(monkeypatch, hangs=False)
    assert served.version == 0 and served.swap_s >= LOAD_S
    assert len([report for report in reports if report.load.version < 0]) >= LOAD_S / FLOOR_S


@long
def test_a_load_that_hangs_ends_its_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerError, match=r"pull was asked for [3-9] s ago.* counted no progress"):
        pulled(monkeypatch, hangs=True)
