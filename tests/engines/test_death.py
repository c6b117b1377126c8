"""A replica with this engine is killed in the middle of something; another goes on from what was told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from bench import Bench, OpenBench, Played, prompt_of

from halting_replica import STEPS
from millrace.core.completion.columns import TokenColumns
from millrace.core.errors import WorkerDied
from millrace.core.protocols import Handle
from millrace.core.types import Progress, Sampling, Work
from millrace.runtime.local.local_runtime import LocalRuntime

pytestmark = pytest.mark.computed

DEADLINE_S = 250.0
IMPORTED = {"vllm": ("millrace.engines.vllm.start", "vllm.v1.engine.llm_engine")}
"""What each replica would import anew, for seconds."""
LENGTH = 90


async def call(handle: Handle, method: str, *args: Any) -> Any:
    return await handle.call(method, *args, timeout_s=DEADLINE_S)


async def played_by(handle: Handle, works: list[Work], tokens: int) -> dict[int, Played]:
    """What comes until all works have ended, or have so many tokens."""
    await call(handle, "submit", works)
    played = {work.trajectory_id: Played(work) for work in works}
    async for report in handle.stream("reports"):
        part: Progress
        for part in report.progress:
            one = played[part.trajectory_id]
            assert part.start == len(one.work.tokens) + len(one.columns) and part.lease == one.work.lease
            one.columns.extend(part.columns)
            one.finish = part.finish
        if all(one.finish is not None or len(one.columns) >= tokens for one in played.values()):
            break
    return played


async def in_the_middle(handle: Handle, moment: str, bench: Bench, played: dict[int, Played]) -> None:
    """Begin it, and kill the replica before it can answer."""
    version = max(bench.models)
    commands: dict[str, list[Any]] = {
        "decoding": [],
        "loading": ["pull", version, bench.endpoint],
        "releasing": ["release", list(played)],
        "taking more in": ["submit", [bench.work(prompt_of(9, 200), Sampling(max_tokens=5))]],
    }
    command = commands[moment]
    started = [asyncio.create_task(call(handle, *command))] if command else []
    await asyncio.sleep(0)
    handle.kill()
    await handle.dead
    for outcome in await asyncio.gather(*started, return_exceptions=True):
        assert isinstance(outcome, WorkerDied) or not isinstance(outcome, BaseException), outcome


class Ward:
    """Replicas of one runtime: each test kills one, and the same other takes over. To open an engine takes
    longer than all that follows."""

    def __init__(self, kind: str, runner: asyncio.Runner) -> None:
        self.run, self._kind = runner.run, kind
        self._runtime = LocalRuntime(("millrace.rollout.replica", *IMPORTED.get(kind, ())))
        self._survivor: Handle | None = None

    async def replica(self, name: str, target: str, bench: Bench) -> Handle:
        kwargs = {
            "name": name,
            "engine": self._kind,
            "options": bench.options,
            "report_interval_s": 0.02,
            "open_reader": "millrace.weights.ring:open_reader",
        }
        return await self._runtime.spawn(name, target, kwargs, timeout_s=DEADLINE_S)

    async def survivor(self, bench: Bench) -> Handle:
        if self._survivor is None:
            self._survivor = await self.replica("r1", "millrace.rollout.replica:EngineReplica", bench)
        return self._survivor

    def close(self) -> None:
        self.run(self._runtime.close())


@pytest.fixture(scope="module")
def ward(kind: str, warm: None) -> Iterator[Ward]:
    with asyncio.Runner() as runner:
        ward = Ward(kind, runner)
        yield ward
        ward.close()


@pytest.mark.stepwise
@pytest.mark.parametrize("moment", ["decoding", "loading", "releasing", "taking more in"])
def test_a_killed_replicas_trajectories_go_on_in_another(
    moment: str, ward: Ward, bench_of: OpenBench
) -> None:
    bench = bench_of(slots=4)
    old, new = bench.publish(1), bench.publish(2)
    works = [
        bench.work(prompt_of(i // 2, 20), Sampling(max_tokens=LENGTH), group_id=i // 2) for i in range(4)
    ]

    async def scenario() -> list[Played]:
        async with asyncio.timeout(DEADLINE_S):
            first = await ward.replica("r0", "halting_replica:HaltingReplica", bench)
            second = await ward.survivor(bench)
            served = await call(first, "pull", old, bench.endpoint)
            assert served.digest == bench.digests[old]
            before = await played_by(first, works, STEPS // 2)
            await in_the_middle(first, moment, bench, before)
            await call(second, "pull", new, bench.endpoint)
            resumed = [resume(bench, one) for one in before.values() if one.finish is None]
            after = await played_by(second, resumed, LENGTH)
        return [joined(one, after.get(key)) for key, one in before.items()]

    played = ward.run(scenario())
    assert all(one.finish is not None for one in played)
    assert any([version for version, _ in one.columns.runs] == [old, new] for one in played)
    bench.check(played)


def resume(bench: Bench, one: Played) -> Work:
    work = one.work
    return bench.work(
        work.prompt,
        work.sampling,
        trajectory_id=work.trajectory_id,
        group_id=work.group_id,
        lease=1,
        tokens=one.columns.tokens,
    )


def joined(one: Played, rest: Played | None) -> Played:
    if rest is None:
        return one
    columns = TokenColumns()
    for part in (one, rest):
        columns.extend(part.columns)
    return Played(one.work, columns, rest.finish)
