"""A version over a link of 20 Mbit/s: it takes many deadlines, hardly any CPU time, and costs no relay."""

from __future__ import annotations

import asyncio
from contextlib import closing

import numpy as np
import pytest
from tests.namespaces import hosts

from millrace.config.tables.operation import Supervision
from millrace.controller import patience
from millrace.controller.patience import Patience
from millrace.controller.supervisor import Supervisor, WorkerSpec
from millrace.controller.waits import Waits
from millrace.core import clock
from millrace.core.digest import NamedBuffer
from millrace.core.events import Events
from millrace.core.placement import Place
from millrace.core.protocols import Handle
from millrace.core.types import Endpoint, Staged
from millrace.runtime.local.local_runtime import LocalRuntime
from millrace.weights.ring import open_writer

NUM_BYTES = 20_000_000  # 8 s on such a link
FLOOR_S = 1.0
POLICY = Supervision(
    heartbeat_timeout_s=3.0, restarts=0, restart_window_s=60.0, backoff_s=0, spawn_timeout_s=120
)
RELAY = "millrace.weights.relay:RelayWorker"


def publish(endpoint: Endpoint) -> str:
    random = np.random.default_rng(0)
    tensors = [
        NamedBuffer(
            f"layers.{i}", "bfloat16", (NUM_BYTES // 16,), random.integers(0, 256, NUM_BYTES // 8, np.uint8)
        )
        for i in range(8)
    ]
    with closing(open_writer(endpoint)) as writer:
        return writer.write(1, tensors)


def test_a_version_that_takes_many_deadlines_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "FLOOR_S", FLOOR_S)
    monkeypatch.setattr(patience, "CREDIT_S_MAX", FLOOR_S / 2)
    monkeypatch.setattr(patience, "CPU_SHARE", 0.5)  # what it uses counts for nothing
    patient, answers = Patience(600.0), list[Staged]()

    async def run() -> None:
        with hosts(2, rate="20mbit") as places:
            runtime = LocalRuntime(hosts={place.name: place.prefix for place in places})
            specs = [
                WorkerSpec(
                    "relay",
                    f"relay-{index}",
                    RELAY,
                    {
                        "name": f"relay-{index}",
                        "slots": 2,
                        "address": place.address,
                        "secret": "of this test",
                    },
                    Place(host=place.name),
                )
                for index, place in enumerate(places)
            ]
            events = Events(clock.now, clock.wall)
            supervisor = Supervisor(runtime, events, POLICY, Waits(), patient.on_heartbeat)

            async def fetch(handle: Handle) -> None:
                await patient.call(handle, "open", NUM_BYTES)
                answers.append(await patient.call(handle, "fetch", 1, digest, [head.address]))

            try:
                async with asyncio.timeout(120.0):
                    root = await runtime.spawn(specs[0].name, RELAY, specs[0].kwargs, place=specs[0].place)
                    head = await root.call("open", NUM_BYTES, timeout_s=60.0)
                    digest = await asyncio.to_thread(publish, head)
                    await root.call("stage", 1, digest, timeout_s=60.0)
                    await supervisor.keep(specs[1], fetch)
            finally:
                await runtime.close()

    asyncio.run(run())
    (staged,) = answers
    assert staged.received_bytes == NUM_BYTES
