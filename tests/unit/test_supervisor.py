"""What ends a worker's supervision."""

from __future__ import annotations

import asyncio

import pytest

from millrace.controller.pulse import Waits
from millrace.controller.supervisor import RestartPolicy, Supervisor, WorkerSpec
from millrace.core import clock
from millrace.core.errors import WorkerDied, WorkerError
from millrace.core.events import Events

POLICY = RestartPolicy(lease_s=1.0, restarts=3, window_s=60.0, backoff_s=0.0, spawn_timeout_s=1.0)


def heard(handle, vitals, asked_s):
    """Nothing to object to."""


class DeadOnArrival:
    """A runtime whose workers die while they are made."""

    starts = 0

    async def spawn(self, name, target, kwargs, *, timeout_s):
        self.starts += 1
        raise WorkerDied(f"{name} (epoch {self.starts}): the worker is gone: killed by signal 11 (SIGSEGV)")


def test_a_worker_that_dies_at_every_start_ends_the_run_with_one_clear_message():
    async def run():
        runtime = DeadOnArrival()
        supervisor = Supervisor(runtime, Events(clock.now, clock.wall), POLICY, Waits(), heard)
        with pytest.raises(WorkerError) as raised:
            await supervisor.keep(WorkerSpec("replica", "replica-0", "a:B"), None)
        return runtime.starts, str(raised.value)

    starts, message = asyncio.run(run())
    assert starts == POLICY.restarts + 1
    for part in ("replica-0 died 4 times", "before it was ready", "SIGSEGV", "logs/replica-0.*.log"):
        assert part in message
