"""A worker of several processes behind one handle."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from conformance import FOR_GANGS, WAIT_S, Scenario
from millrace.core.errors import DataError, WorkerDied, WorkerError
from millrace.core.placement import Place
from millrace.runtime import workers
from millrace.runtime.local.local_runtime import LocalRuntime
from millrace.runtime.seam import PING
from millrace.runtime.workers import GangHandle

PROBE = "millrace.runtime.probe:Probe"
RANK = "runtime_workers:Rank"


class TwoRanks(LocalRuntime):
    """Every worker has two."""

    async def spawn(self, *args: Any, **more: Any) -> Any:
        return await super().spawn(*args, **{"place": Place(ranks=2)} | more)


@pytest.mark.parametrize("scenario", FOR_GANGS, ids=lambda scenario: scenario.__name__)
def test_a_gang_conforms(scenario: Scenario) -> None:
    asyncio.run(scenario(TwoRanks))


def with_gang(
    use: Callable[[GangHandle], Awaitable[None]], place: Place = Place(ranks=2), log_dir: Path | None = None
) -> None:
    async def run() -> None:
        runtime = LocalRuntime(log_dir=log_dir)
        try:
            worker = await runtime.spawn("gang", RANK, place=place)
            assert isinstance(worker, GangHandle)
            await use(worker)
        finally:
            await runtime.close()

    asyncio.run(run())


async def call(worker: GangHandle, method: str, *args: Any) -> Any:
    return await worker.call(method, *args, timeout_s=WAIT_S)


async def cause_of_death(worker: GangHandle) -> str:
    return await asyncio.wait_for(asyncio.shield(worker.dead), WAIT_S)


def test_each_rank_knows_its_place_and_has_a_log_of_its_own(tmp_path: Path) -> None:
    async def use(worker: GangHandle) -> None:
        stores = set()
        for rank, member in enumerate(worker.members):
            known = await member.call("variables", timeout_s=WAIT_S)
            assert (known["RANK"], known["WORLD_SIZE"], known["MORE"]) == (str(rank), "2", "1")
            assert (known["CUDA_VISIBLE_DEVICES"], known["LOCAL_RANK"]) == (str(rank + 4), "0")
            stores.add(known["MILLRACE_RENDEZVOUS"])
        assert await call(worker, "variables") == await worker.members[0].call("variables", timeout_s=WAIT_S)
        (store,) = stores
        assert os.access(store.removeprefix("file://"), os.R_OK | os.W_OK)
        worker.kill()
        await cause_of_death(worker)
        assert not os.access(store.removeprefix("file://"), os.R_OK)
        assert sorted(os.listdir(tmp_path)) == ["gang.0.1.log", "gang.1.1.log"]

    with_gang(use, Place(ranks=2, devices=(4, 5), environ={"MORE": "1"}), tmp_path)


def test_ranks_on_several_hosts_get_their_parts_of_the_place_and_a_network() -> None:
    async def use(worker: GangHandle) -> None:
        place = Place(host="a", ranks=4, devices=(0, 1, 2, 0), hosts=("a", "b"), meet="10.0.0.1")
        handle = GangHandle[Any]("four", 1, worker.members * 2)
        parts = [handle._place_of(place, rank) for rank in range(4)]
        assert [(part.host, part.devices) for part in parts] == [
            ("a", (0,)),
            ("a", (1,)),
            ("b", (2,)),
            ("b", (0,)),
        ]
        assert all(part.environ["MILLRACE_NETWORK"] == "10.0.0.1" for part in parts)
        assert not any("GLOO_SOCKET_IFNAME" in part.environ for part in parts)

    with_gang(use)


def test_a_worker_of_an_earlier_session_had_another_epoch_with_however_many_ranks(tmp_path: Path) -> None:
    async def session(ranks: int) -> int:
        runtime = LocalRuntime(log_dir=tmp_path)
        worker = await runtime.spawn("gang", PROBE, place=Place(ranks=ranks))
        await runtime.close()
        return worker.epoch

    assert [asyncio.run(session(ranks)) for ranks in (1, 2, 1, 3)] == [1, 2, 3, 4]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_in_the_middle_of_a_call_ends_all_and_is_named(victim: int) -> None:
    async def use(worker: GangHandle) -> None:
        pids = [member.pid for member in worker.members]
        assert worker.pid == pids[0]

        async def expect_death() -> None:
            with pytest.raises(
                WorkerDied, match=rf"gang \(epoch 1\): wait.*rank {victim}: killed by signal 9"
            ):
                await call(worker, "wait")

        async with asyncio.TaskGroup() as group:
            group.create_task(expect_death())
            while [one.method for one in (await call(worker, PING)).calls] != ["wait", "wait"]:  # noqa: ASYNC110 - as `conformance.eventually`
                await asyncio.sleep(0.005)
            os.kill(pids[victim] or 0, signal.SIGKILL)
        assert await cause_of_death(worker) == f"rank {victim}: killed by signal 9 (SIGKILL)"
        assert all(member.dead.done() for member in worker.members)
        with pytest.raises(WorkerDied, match=f"rank {victim}"):
            await call(worker, "agree", "same")

    with_gang(use)


def test_the_answer_of_rank_0_counts_and_an_error_of_any_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(worker: GangHandle) -> None:
        assert (await call(worker, "agree", "same")).digest == "same"
        for ranks in ([0], [1], [0, 1]):
            with pytest.raises(DataError, match=f"raised by rank {ranks[0]}"):
                await call(worker, "fail", ranks)
        assert (await call(worker, "agree", "same")).digest == "same"

    with_gang(use)


def test_ranks_that_wait_for_one_that_raised_are_killed_and_its_error_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "GRACE_S", 0.05)

    async def use(worker: GangHandle) -> None:
        with pytest.raises(DataError, match="raised by rank 1"):
            await call(worker, "fail", [1], True)
        assert await cause_of_death(worker) == "killed: 1 ranks did not answer fail after one had raised"

    with_gang(use)


def test_ranks_that_disagree_are_killed_and_what_they_said_is_told() -> None:
    async def use(worker: GangHandle) -> None:
        with pytest.raises(WorkerError, match=r"disagree on the digest of differ's answer: \['0', '1'\]"):
            await call(worker, "differ")
        assert "disagree" in await cause_of_death(worker)

    with_gang(use)


def test_the_vitals_of_a_gang_are_those_of_all_ranks() -> None:
    async def use(worker: GangHandle) -> None:
        each = [await member.call(PING, timeout_s=WAIT_S) for member in worker.members]
        together = await call(worker, PING)
        assert together.resident_bytes > 1.5 * max(vitals.resident_bytes for vitals in each)
        assert together.cpu_s >= sum(vitals.cpu_s for vitals in each)
        assert together.queued_s >= sum(vitals.queued_s for vitals in each)
        assert not worker.suspended
        os.kill(worker.members[1].pid or 0, signal.SIGSTOP)
        while not worker.suspended:  # noqa: ASYNC110 - the state is in another process
            await asyncio.sleep(0.005)

    with_gang(use)


def test_a_rank_that_cannot_be_made_is_the_error_of_the_spawn() -> None:
    async def run() -> None:
        runtime = LocalRuntime()
        try:
            with pytest.raises(DataError, match="rank 1 cannot be made"):
                await runtime.spawn("gang", RANK, {"unfit": 1}, place=Place(ranks=2))
        finally:
            await runtime.close()

    asyncio.run(run())


def test_a_gang_has_no_streams_and_begins_no_calls() -> None:
    async def use(worker: GangHandle) -> None:
        with pytest.raises(WorkerError, match=r"gang \(epoch 1\): echo: several ranks take no call_then"):
            worker.call_then("echo", 1, done=lambda *_: None)
        with pytest.raises(WorkerError, match=r"gang \(epoch 1\): count: several ranks have no streams"):
            await anext(worker.stream("count"))

    with_gang(use)
