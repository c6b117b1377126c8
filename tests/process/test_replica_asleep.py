"""A replica on a device that is lent in turns: it begins asleep, and forgets no token while it sleeps."""

from __future__ import annotations

import asyncio

import pytest
from test_replica_role import DEADLINE_S, until_finished, until_sampled, work

from millrace.core.errors import WorkerError
from millrace.core.types import Endpoint, Progress, Report
from millrace.rollout.protocol import EngineOptions
from millrace.rollout.replica import SharedReplica


def make_replica(model_path: str) -> SharedReplica:
    options = EngineOptions(
        model_path=model_path, device="cpu", slots=8, max_sequence_tokens=320, keep_kv=False, probe=False
    )
    return SharedReplica(
        "replica-0", "own", options, report_interval_s=0.02, open_reader="replica_reader:FileReader"
    )


def test_it_begins_asleep_and_pulls_only_awake(model_path: str, endpoint: Endpoint) -> None:
    async def scenario() -> None:
        replica = make_replica(model_path)
        with pytest.raises(WorkerError, match=r"replica-0 is asleep: `wake` must come first"):
            await replica.pull(0, endpoint)
        await replica.wake()
        await replica.wake()
        assert (await replica.pull(0, endpoint)).version == 0
        await replica.sleep()
        await replica.sleep()
        with pytest.raises(WorkerError, match="asleep"):
            await replica.pull(0, endpoint)

    asyncio.run(scenario())


def test_trajectories_go_on_under_the_version_after_its_sleep(model_path: str, endpoint: Endpoint) -> None:
    async def scenario() -> tuple[list[Progress], Report]:
        replica = make_replica(model_path)
        reports = replica.reports()
        await replica.wake()
        await replica.pull(0, endpoint)
        await replica.submit([work(i, 300) for i in range(3)])
        progress = await until_sampled(reports, 30)
        await replica.sleep()
        async with asyncio.timeout(DEADLINE_S):  # it still says that it lives
            progress += (asleep := await anext(reports)).progress
            while asleep.load.version != -1:
                progress += (asleep := await anext(reports)).progress
        await replica.submit([work(3, 10)])
        await replica.wake()
        await replica.pull(1, endpoint)
        return progress + await until_finished(reports, {0, 1, 2, 3}), asleep

    progress, asleep = asyncio.run(scenario())
    assert asleep.load.waiting == 3 and asleep.load.running == asleep.load.kv_used_tokens == 0
    for i in range(3):
        parts = [p for p in progress if p.trajectory_id == i]
        assert sum(len(p.columns) for p in parts) == 300
        assert [version for p in parts for version, _ in p.columns.runs] == sorted(
            version for p in parts for version, _ in p.columns.runs
        )
        assert {version for p in parts for version, _ in p.columns.runs} == {0, 1}
