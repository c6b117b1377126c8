"""What ends a worker's supervision."""

from __future__ import annotations

import asyncio

import pytest

from millrace.config.tables.operation import Supervision
from millrace.controller.fault import may_restart
from millrace.controller.supervisor import Supervisor, WorkerSpec
from millrace.controller.waits import Waits
from millrace.core import clock
from millrace.core.errors import ConfigError, RemoteError, WorkerDied, WorkerError
from millrace.core.events import Events
from millrace.core.progress import Vitals

POLICY = Supervision(restarts=3, restart_window_s=60.0, backoff_s=0.0, spawn_timeout_s=1.0).model_copy(
    update={"heartbeat_timeout_s": 1.0}  # shorter than a run may set it
)


def on_heartbeat(handle, vitals, sent_s):
    """Nothing to object to."""


class DeadOnArrival:
    """A runtime whose workers die while they are made."""

    starts = 0

    async def spawn(self, name, *args, **how):
        self.starts += 1
        raise WorkerDied(f"{name} (epoch {self.starts}): the worker is gone: killed by signal 11 (SIGSEGV)")


def test_a_worker_that_dies_at_every_start_ends_the_run_with_one_clear_message():
    async def run():
        runtime = DeadOnArrival()
        supervisor = Supervisor(runtime, Events(clock.now, clock.wall), POLICY, Waits(), on_heartbeat)
        with pytest.raises(WorkerError) as raised:
            await supervisor.keep(WorkerSpec("replica", "replica-0", "a:B"), None)
        return runtime.starts, str(raised.value)

    starts, message = asyncio.run(run())
    assert starts == POLICY.restarts + 1
    for part in ("replica-0 died 4 times", "before it was ready", "SIGSEGV", "logs/replica-0.*.log"):
        assert part in message


class Patient:
    """A runtime that notes how long a start may take."""

    async def spawn(self, *args, timeout_s=60.0, **how):
        self.timeout_s = timeout_s
        raise RemoteError("nothing starts here")


@pytest.mark.parametrize(("own_s", "expected_s"), [(0.0, 1.0), (0.5, 1.0), (900.0, 900.0)])
def test_a_worker_whose_start_takes_long_gets_longer_than_others(own_s, expected_s):
    async def run():
        runtime = Patient()
        supervisor = Supervisor(runtime, Events(clock.now, clock.wall), POLICY, Waits(), on_heartbeat)
        with pytest.raises(RemoteError):
            await supervisor.keep(WorkerSpec("replica", "replica-0", "a:B", spawn_s_max=own_s), None)
        return runtime.timeout_s

    assert asyncio.run(run()) == expected_s


class Killed:
    """A runtime whose workers answer one heartbeat and are killed then."""

    name, epoch = "trainer", 1

    async def spawn(self, name, *args, **how):
        self.dead = asyncio.get_running_loop().create_future()
        return self

    async def call(self, method, *args, timeout_s):
        asyncio.get_running_loop().call_soon(self.dead.set_result, "killed by signal 9 (SIGKILL)")
        return Vitals(cpu_s=0.0, resident_bytes=123_000_000, disk=False, calls=[])

    def kill(self):
        pass


def test_of_a_worker_that_was_killed_is_told_how_much_memory_it_held():
    async def session(handle):
        await asyncio.sleep(60.0)

    async def run():
        policy = POLICY.model_copy(update={"heartbeat_timeout_s": 0.01, "restarts": 0})
        supervisor = Supervisor(Killed(), Events(clock.now, clock.wall), policy, Waits(), on_heartbeat)
        with pytest.raises(WorkerError, match=r"SIGKILL\).*for want of memory \(123 MB were resident\)"):
            await supervisor.keep(WorkerSpec("trainer", "trainer", "a:B"), session)

    asyncio.run(run())


class Raises(Killed):
    """A runtime whose workers live on and whose sessions get a foreign exception from them."""

    starts = 0

    async def spawn(self, name, *args, **how):
        self.starts += 1
        return await super().spawn(name, *args, **how)


@pytest.mark.parametrize("worked", [True, False])
def test_a_foreign_exception_ends_the_run_only_where_the_worker_never_worked(worked):
    waits, runtime = Waits(), Raises()

    async def session(handle):
        if worked:
            waits.progress("trainer")
        if runtime.starts == 1:
            raise RemoteError("CUDA error: an illegal memory access")

    async def run():
        supervisor = Supervisor(runtime, Events(clock.now, clock.wall), POLICY, waits, on_heartbeat)
        await supervisor.keep(WorkerSpec("trainer", "trainer", "a:B"), session)

    if worked:
        asyncio.run(run())
        assert runtime.starts == 2
    else:
        with pytest.raises(RemoteError):
            asyncio.run(run())


class LostAtTheEnd:
    """A runtime whose first worker is lost in the moment in which its session is over."""

    name, epoch, starts = "trainer", 1, 0

    async def spawn(self, name, *args, **how):
        self.starts += 1
        self.dead = asyncio.get_running_loop().create_future()
        return self

    async def call(self, method, *args, timeout_s):
        try:
            await asyncio.sleep(60.0)
        except asyncio.CancelledError:
            if self.starts == 1:
                raise WorkerDied("trainer (epoch 1): lost") from None
            raise

    def kill(self):
        pass


def test_a_worker_that_is_lost_as_its_session_ends_is_made_anew_and_cancels_nothing():
    async def session(handle):
        await asyncio.sleep(0.05)

    async def run():
        runtime, policy = LostAtTheEnd(), POLICY.model_copy(update={"heartbeat_timeout_s": 0.03})
        supervisor = Supervisor(runtime, Events(clock.now, clock.wall), policy, Waits(), on_heartbeat)
        await supervisor.keep(WorkerSpec("trainer", "trainer", "a:B"), session)
        return runtime.starts, asyncio.current_task().cancelling()

    assert asyncio.run(run()) == (2, 0)


@pytest.mark.parametrize("role", ["trainer", "reference", "replica", "relay", "reward worker"])
def test_an_error_of_its_own_is_not_tried_again_by_who_has_the_run_itself(role):
    error = ConfigError("no CUDA any more")
    error.raised_in = f"{role}: start"
    again = role not in ("trainer", "reference")
    assert may_restart(error, role, started=True, worked=True) is again
    assert may_restart(WorkerDied("killed"), role, started=True, worked=True)
