"""A trajectory that begins again: its worker has closed the episode before it answers the first turn."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from millrace.config.tables.schedules import RLAX, Laminar, Millrace, RollFlash, RollPacker
from millrace.core.turns.packed import PackedRequest, unpack_request
from millrace.core.types import Observed, Score, ScoreRequest
from millrace_sim.explore.invariants import Invariants
from millrace_sim.explore.worlds import small_config, with_turns
from millrace_sim.roles import SimRewardWorker
from millrace_sim.simulation import Scenario, simulate
from tests.long import few


class OpenTurns:
    """Which episodes each worker has open, from its answers and from what it is told to forget."""

    def __init__(self) -> None:
        self.by_worker: dict[Any, set[int]] = {}
        self.begun_open: list[int] = []
        self.told = self.begun = 0


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> OpenTurns:
    turns, score, answer = OpenTurns(), SimRewardWorker.score, SimRewardWorker.answer

    async def watched(
        worker: Any, requests: list[ScoreRequest]
    ) -> AsyncIterator[tuple[int, Score | Observed]]:
        mine, by_id = (
            turns.by_worker.setdefault(worker, set()),
            {one.trajectory_id: one for one in requests},
        )
        async for trajectory_id, answer in score(worker, requests):
            if not turns.begun and len(by_id[trajectory_id].turns) == 1 and trajectory_id in mine:
                turns.begun_open.append(trajectory_id)
            (mine.add if isinstance(answer, Observed) else mine.discard)(trajectory_id)
            yield trajectory_id, answer

    async def begun(worker: Any, packed: PackedRequest) -> Any:
        request = unpack_request(packed)
        mine, tid = turns.by_worker.setdefault(worker, set()), request.trajectory_id
        if request.begins and tid in mine:
            turns.begun_open.append(tid)
        answered = await answer(worker, packed)
        if request.begins:
            mine.add(tid)
            turns.begun += 1
        return answered

    async def forget(worker: Any, trajectory_ids: list[int]) -> dict[str, int]:
        turns.told += len(trajectory_ids)
        turns.by_worker.setdefault(worker, set()).difference_update(trajectory_ids)
        return {"open": len(turns.by_worker[worker])}

    monkeypatch.setattr(SimRewardWorker, "answer", begun)
    monkeypatch.setattr(SimRewardWorker, "score", watched)
    monkeypatch.setattr(SimRewardWorker, "forget", forget)
    return turns


@pytest.mark.parametrize(
    "schedule",
    [RLAX(acceptance_staleness=2), Millrace(mix="never"), RollPacker(), RollFlash(mix="never"), Laminar()],
    ids=lambda one: one.kind,
)
@pytest.mark.parametrize("agents", [False, True])
@pytest.mark.parametrize("seeds", few([range(3), range(3, 8)]))
def test_no_episode_stays_open_behind_one_that_begins_again(
    turns: OpenTurns, schedule: Any, seeds: range, agents: bool
) -> None:
    restarted = 0
    for seed in seeds:
        scenario = with_turns(Scenario(small_config(schedule, steps=8, seed=seed)), agents=agents)
        outcome = simulate(scenario, Invariants(scenario))
        assert outcome.accounting.balanced
        restarted += len(outcome.of("restarted"))
    if agents:  # a first turn goes on with the episode that was begun
        assert turns.begun
    assert turns.begun_open == [] and turns.told
    assert restarted or schedule.kind != "rollpacker"
