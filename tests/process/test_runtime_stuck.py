"""A real process that answers heartbeats and gets nowhere in its first call, beside one that computes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace.config.tables.operation import Supervision
from millrace.controller import patience
from millrace.controller.patience import Patience
from millrace.controller.supervisor import Supervisor, WorkerSpec
from millrace.controller.waits import Waits
from millrace.core import clock
from millrace.core.events import Event, Events
from millrace.core.protocols import Handle
from millrace.runtime.local.local_runtime import LocalRuntime

POLICY = Supervision(
    heartbeat_timeout_s=3.0, restarts=3, restart_window_s=60.0, backoff_s=0, spawn_timeout_s=120
)
SPEC = WorkerSpec("replica", "replica-0", "runtime_workers:Process")
FLOOR_S = 2.0


STUCK = [("hang_on_a_lock",), ("receive_slowly", 60.0, FLOOR_S)]
WORKING = [
    ("compute", 2 * FLOOR_S),
    ("wait_for_a_child", 2 * FLOOR_S),
    ("receive_slowly", *(3 * FLOOR_S,) * 2),
]


@pytest.mark.parametrize(("stuck", "works"), [(STUCK[i % 2], works) for i, works in enumerate(WORKING)])
def test_a_call_that_gets_nowhere_is_given_up_and_one_that_works_for_as_long_is_not(
    stuck: tuple[Any, ...], works: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "FLOOR_S", FLOOR_S)
    monkeypatch.setattr(patience, "CREDIT_S_MAX", FLOOR_S / 2)
    log: list[Event] = []
    events, patient = Events(clock.now, clock.wall), Patience(600.0)
    events.subscribe(log.append)

    async def session(handle: Handle) -> None:
        await patient.call(handle, *(stuck if handle.epoch == 1 else works))

    async def run() -> int:
        runtime = LocalRuntime()
        supervisor = Supervisor(runtime, events, POLICY, Waits(), patient.on_heartbeat)
        try:
            async with asyncio.timeout(240.0):
                await supervisor.keep(SPEC, session)
        finally:
            await runtime.close()
        return supervisor.restarts

    assert asyncio.run(run()) == 1
    (death,) = [event.fields["cause"] for event in log if event.kind == "worker_died"]
    assert f"replica-0 (epoch 1): {stuck[0]} was asked for" in death and "neither computed" in death
