"""Simulated roles keep the promises of `core.protocols`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

import millrace_sim
from millrace.core import clock
from millrace.core.completion.columns import TokenColumns
from millrace.core.errors import DataError, TornVersionError, TrainingError, UnknownVersionError, WorkerDied
from millrace.core.protocols import Handle
from millrace.core.types import (
    Batch,
    Endpoint,
    Failed,
    Finish,
    Progress,
    Prompt,
    ReplicaLoad,
    Sampling,
    Scored,
    ScoreRequest,
    Staged,
    TrainGroup,
    TrainSequence,
    Work,
)
from millrace_sim.roles.batching import BatchingEngine
from millrace_sim.roles.sim_reward_worker import SimRewardWorker
from millrace_sim.virtual.sim_runtime import SimRuntime

ROLES = "millrace_sim.roles"
SAMPLING = Sampling(max_tokens=64)
COSTS = millrace_sim.Costs(
    decode_base_s=0.01, decode_per_sequence_s=0.0, prefill_per_token_s=0.001, swap_s=0.1
)
WORKLOAD = millrace_sim.Workload()


def work(tid: int, *, lease: int = 1, tokens: Iterable[int] = (), prompt: int = 10) -> Work:
    return Work(tid, tid // 4, lease, list(range(prompt)), list(tokens), SAMPLING, seed=7)


def decoder(*, slots: int = 4, kv_capacity_tokens: int = 10_000, version: int = 0) -> BatchingEngine:
    engine = BatchingEngine(
        slots=slots, kv_capacity_tokens=kv_capacity_tokens, keep_kv=False, costs=COSTS, workload=WORKLOAD
    )
    if version >= 0:
        engine.swap(version, 0.0, 1.0)
    return engine


def lengths(parts: Iterable[Progress]) -> dict[int, int]:
    total: dict[int, int] = {}
    for part in parts:
        total[part.trajectory_id] = total.get(part.trajectory_id, 0) + len(part.columns)
    return total


# ---------------------------------------------------------------- decoding


def test_a_decode_step_gives_every_running_sequence_a_token() -> None:
    engine = decoder()
    engine.submit([work(0), work(4)], 1.0, 1.0)  # two groups: 20 prompt tokens, 0.02 s
    assert lengths(engine.collect(1.02 + 0.05, 1.0)) == {0: 5, 4: 5}
    assert lengths(engine.collect(1.02 + 0.07, 1.0)) == {0: 2, 4: 2}


def test_a_group_that_runs_together_is_prefilled_once() -> None:
    engine = decoder()
    engine.submit([work(0), work(1), work(2)], 1.0, 1.0)
    assert engine.load().prefilled_tokens == 10


def test_a_slow_engine_makes_fewer_steps() -> None:
    engine = decoder()
    engine.submit([work(0)], 1.0, 1.0)
    assert lengths(engine.collect(1.01 + 0.2, slowdown=4.0)) == {0: 5}


def test_nothing_decodes_before_the_first_version() -> None:
    engine = decoder(version=-1)
    engine.submit([work(0)], 0.0, 1.0)
    assert engine.collect(10.0, 1.0) == []
    assert engine.load() == ReplicaLoad(-1, waiting=1, kv_capacity_tokens=10_000, idle_s=10.0)


def test_more_work_than_slots_waits_its_turn_and_all_of_it_ends() -> None:
    engine = decoder(slots=2)
    engine.submit([work(tid) for tid in range(9)], 0.0, 1.0)
    load = engine.load()
    assert (load.running, load.waiting) == (2, 7)
    parts = engine.collect(1000.0, 1.0)
    assert {p.trajectory_id for p in parts if p.finish is not None} == set(range(9))
    assert engine.quiet


def test_a_sequence_waits_until_its_largest_kv_fits() -> None:
    engine = decoder(slots=4, kv_capacity_tokens=2 * (10 + 64))
    engine.submit([work(tid) for tid in range(4)], 0.0, 1.0)
    assert (engine.load().running, engine.load().waiting) == (2, 2)
    engine.collect(1000.0, 1.0)
    assert engine.quiet


def test_a_trajectory_has_the_same_length_however_often_it_moves() -> None:
    whole = lengths(decoder_run([work(5)]))[5]
    first = decoder()
    first.submit([work(5)], 0.0, 1.0)
    num_released = lengths(first.release([5], 0.15, 1.0))[5]
    assert 0 < num_released < whole
    rest = decoder_run([work(5, lease=2, tokens=range(num_released))])
    assert rest[0].start == num_released
    assert num_released + lengths(rest)[5] == whole


def decoder_run(works: list[Work]) -> list[Progress]:
    engine = decoder()
    engine.submit(works, 0.0, 1.0)
    return engine.collect(1000.0, 1.0)


def test_a_trajectory_that_was_complete_already_ends_without_new_tokens() -> None:
    whole = lengths(decoder_run([work(5)]))[5]
    (part,) = decoder_run([work(5, lease=2, tokens=range(whole))])
    assert (part.start, len(part.columns), part.finish) == (whole, 0, Finish.STOP)


def test_lengths_are_cut_at_the_budget() -> None:
    ends = [WORKLOAD.completion_length(7, tid, 64) for tid in range(500)]
    assert {length for length, finish in ends if finish is Finish.LENGTH} == {64}
    assert max(length for length, finish in ends if finish is Finish.STOP) <= 64
    assert 30 < sorted(length for length, _ in ends)[250] < 50


def test_submitting_a_lease_twice_changes_nothing() -> None:
    engine = decoder()
    engine.submit([work(0)], 0.0, 1.0)
    before = lengths(engine.collect(0.3, 1.0))[0]
    engine.submit([work(0)], 0.3, 1.0)
    assert engine.load().running == 1
    after = lengths(engine.collect(1000.0, 1.0))[0]
    engine.submit([work(0)], 1000.0, 1.0)
    assert engine.collect(2000.0, 1.0) == []
    assert before + after == WORKLOAD.completion_length(7, 0, 64)[0]


def test_what_has_completed_but_was_not_collected_is_released_with_its_end() -> None:
    engine = decoder()
    engine.submit([work(0)], 0.0, 1.0)
    parts = engine.release([0], 1000.0, 1.0)
    assert parts[-1].finish is not None
    assert engine.release([0], 1000.0, 1.0) == [] and engine.collect(1000.0, 1.0) == []


def test_released_trajectories_give_back_their_tokens_by_version() -> None:
    engine = decoder()
    engine.submit([work(0)], 1.0, 1.0)
    reported = engine.collect(1.01 + 0.05, 1.0)
    engine.swap(3, 1.01 + 0.05, 1.0)  # 0.1 s, then its KV of 15 tokens again: 0.015 s
    (part,) = engine.release([0, 99], 1.01 + 0.05 + 0.115 + 0.03, 1.0)
    assert (part.start, part.columns.runs, part.finish) == (0, [(0, 5), (3, 3)], None)
    assert lengths(reported) == {0: 5}
    assert engine.release([0], 2.0, 1.0) == []
    assert engine.collect(9.0, 1.0) == []


def test_a_release_answers_for_a_trajectory_without_tokens() -> None:
    engine = decoder(slots=1)
    engine.submit([work(0), work(1)], 0.0, 1.0)
    (waiting,) = engine.release([1], 0.0, 1.0)
    assert (waiting.trajectory_id, waiting.start, len(waiting.columns)) == (1, 0, 0)


def test_time_is_either_busy_or_idle() -> None:
    engine = decoder(slots=2)
    engine.submit([work(tid) for tid in range(5)], 2.0, 1.0)
    engine.collect(100.0, 1.0)
    load = engine.load()
    assert load.busy_s > 0
    assert load.busy_s + load.idle_s == pytest.approx(100.0 - COSTS.swap_s)


# ---------------------------------------------------------------- roles under the runtime


@dataclass
class Stage:
    """A trainer, a relay and a replica, version 0 published and staged."""

    runtime: SimRuntime
    world: millrace_sim.World
    trainer: Handle
    relay: Handle
    replica: Handle
    endpoint: Endpoint

    async def publish(self) -> Staged:
        await call(self.trainer, "publish", self.endpoint)
        published = await call(self.trainer, "await_published")
        return await call(self.relay, "stage", published.version, published.digest)

    async def step(self) -> Any:
        await call(self.trainer, "checkpoint", "here")
        version = (await call(self.trainer, "await_saved")).version
        return await call(self.trainer, "step", batch(version))


async def call(handle: Handle, method: str, *args: Any) -> Any:
    return await handle.call(method, *args, timeout_s=60.0)


def batch(version: int, tokens: int = 20, versions: int = 0) -> Batch:
    sequences = [
        TrainSequence(tid, TokenColumns.of([0] * tokens, [-1.0] * tokens, versions), reward, truncated=False)
        for tid, reward in ((0, 0.0), (1, 1.0))
    ]
    return Batch(version, [TrainGroup(0, [0] * 10, sequences)])


@asynccontextmanager
async def staged(
    slots: int = 3, faults: millrace_sim.Faults = millrace_sim.Faults(), slice_s: float = 0.0
) -> AsyncIterator[Stage]:
    runtime, world = SimRuntime(0, faults=faults), millrace_sim.World()
    trainer = await runtime.spawn("trainer", f"{ROLES}:SimTrainer", {"world": world})
    relay = await runtime.spawn("relay", f"{ROLES}:SimRelay", {"world": world, "slots": slots})
    options = {"world": world, "slots": 4, "kv_capacity_tokens": 4096, "keep_kv": False, "slice_s": slice_s}
    replica = await runtime.spawn("replica", f"{ROLES}:SimReplica", options)
    state = await call(trainer, "load", None)
    endpoint = await call(relay, "open", state.slot_bytes)
    stage = Stage(runtime, world, trainer, relay, replica, endpoint)
    await stage.publish()
    yield stage
    await runtime.close()


def on_stage(scenario: Callable[[Stage], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with staged(**options) as stage:
            return await scenario(stage)

    return millrace_sim.run(main(), seed=0, time_max_s=1e5)


@pytest.mark.parametrize("slice_s", [0.0, 0.02])
def test_a_replica_streams_all_tokens_of_its_work_in_order(slice_s: float) -> None:
    async def scenario(stage: Stage) -> dict[int, int]:
        await call(stage.replica, "pull", 0, stage.endpoint)
        await call(stage.replica, "submit", [work(tid) for tid in range(6)])
        num_tokens: dict[int, int] = dict.fromkeys(range(6), 0)
        left = set(num_tokens)
        async with aclosing(stage.replica.stream("reports")) as reports:
            async for report in reports:
                for part in report.progress:
                    assert part.start == num_tokens[part.trajectory_id]
                    num_tokens[part.trajectory_id] += len(part.columns)
                    if part.finish is not None:
                        left.remove(part.trajectory_id)
                if not left:
                    return num_tokens
        raise AssertionError("the stream of a replica does not end")

    expected = {tid: WORKLOAD.completion_length(7, tid, 64)[0] for tid in range(6)}
    assert on_stage(scenario, slice_s=slice_s) == expected


def test_work_that_arrives_within_a_slice_waits_for_its_end() -> None:
    async def scenario(stage: Stage) -> float:
        await call(stage.replica, "pull", 0, stage.endpoint)
        async with aclosing(stage.replica.stream("reports")) as reports, asyncio.TaskGroup() as group:
            first = group.create_task(anext(reports))
            await call(stage.replica, "submit", [work(0)])
            await asyncio.sleep(0.01)
            sent_s = clock.now()
            await call(stage.replica, "submit", [work(4)])
            waited_s = clock.now() - sent_s
            await first
        return waited_s

    decoding_s = WORKLOAD.completion_length(7, 0, 64)[0] * millrace_sim.Costs().decode_step_s(1)
    assert decoding_s / 2 < on_stage(scenario, slice_s=60.0) < decoding_s
    assert on_stage(scenario) < 0.01


def test_slices_of_a_replica_that_has_work_and_no_weights_let_time_pass() -> None:
    async def scenario(stage: Stage) -> float:
        await call(stage.replica, "submit", [work(0)])
        async with aclosing(stage.replica.stream("reports")) as reports:
            for _ in range(3):
                assert not (await anext(reports)).progress
        return clock.now()

    assert on_stage(scenario, slice_s=0.02) > 0.2


def test_a_replica_without_work_reports_once_a_second() -> None:
    async def scenario(stage: Stage) -> list[float]:
        times = []
        async with aclosing(stage.replica.stream("reports")) as reports:
            async for _ in reports:
                times.append(clock.now())
                if len(times) == 5:
                    return times
        return times

    times = on_stage(scenario)
    assert all(0.9 < b - a < 1.1 for a, b in pairwise(times))


def test_a_pull_serves_the_version_with_its_digest_and_a_repeat_costs_nothing() -> None:
    async def scenario(stage: Stage) -> None:
        served = await call(stage.replica, "pull", 0, stage.endpoint)
        assert (served.version, served.digest) == (0, "sim-0")
        assert served.pull_s == pytest.approx(millrace_sim.Costs().pull_s)
        assert served.swap_s == pytest.approx(millrace_sim.Costs().swap_s)
        assert (await call(stage.replica, "pull", 0, stage.endpoint)).pull_s == 0.0

    on_stage(scenario)


def test_a_version_that_is_not_held_cannot_be_pulled() -> None:
    async def scenario(stage: Stage) -> None:
        with pytest.raises(UnknownVersionError, match=r"version 5 is not held; held: \[0\]"):
            await call(stage.replica, "pull", 5, stage.endpoint)

    on_stage(scenario)


def test_the_relay_holds_the_last_versions_only() -> None:
    async def scenario(stage: Stage) -> list[int]:
        for _ in range(4):
            await stage.step()
            await stage.publish()
        with pytest.raises(UnknownVersionError):
            await call(stage.replica, "pull", 1, stage.endpoint)
        return (await stage.publish()).versions

    assert on_stage(scenario, slots=3) == [2, 3, 4]


def test_a_version_that_is_overwritten_during_a_pull_is_torn() -> None:
    async def scenario(stage: Stage) -> None:
        for _ in range(2):
            await stage.step()
        async with asyncio.TaskGroup() as group:
            pull = group.create_task(expect_torn(call(stage.replica, "pull", 0, stage.endpoint)))
            await asyncio.sleep(0.02)
            await call(stage.trainer, "publish", stage.endpoint)
        assert pull.done()

    on_stage(scenario, slots=1)


async def expect_torn(pull: Awaitable[Any]) -> None:
    with pytest.raises(TornVersionError, match="version 0 was overwritten while it was read"):
        await pull


def test_the_slots_of_a_dead_relay_are_gone() -> None:
    async def scenario(stage: Stage) -> None:
        stage.relay.kill()
        await asyncio.shield(stage.relay.dead)
        with pytest.raises(UnknownVersionError, match="the relay that opened it is gone"):
            await call(stage.replica, "pull", 0, stage.endpoint)
        relay = await stage.runtime.spawn("relay", f"{ROLES}:SimRelay", {"world": stage.world, "slots": 3})
        assert (await call(relay, "open", 1)).path != stage.endpoint.path

    on_stage(scenario)


def test_a_repeated_step_returns_its_result_again_and_any_other_batch_is_refused() -> None:
    async def scenario(stage: Stage) -> None:
        first = await call(stage.trainer, "step", batch(0))
        assert (first.version, first.trained_tokens, first.metrics["reward"]) == (1, 40, 0.5)
        before = clock.now()
        assert await call(stage.trainer, "step", batch(0)) == first
        assert clock.now() - before < 0.1
        second = await call(stage.trainer, "step", batch(1, versions=0))
        assert second.logprob_gap == {1: (0.0, 0.0, 40)}
        with pytest.raises(TrainingError, match="a batch for version 5, but the trainer is at 2"):
            await call(stage.trainer, "step", batch(5))

    on_stage(scenario)


def test_a_killed_trainer_has_only_its_checkpoints() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.step()
        await call(stage.trainer, "checkpoint", "run/checkpoints")
        saved = await call(stage.trainer, "await_saved")
        assert saved.path == "run/checkpoints/v00000001"
        await stage.step()
        stage.trainer.kill()
        await asyncio.shield(stage.trainer.dead)
        again = await stage.runtime.spawn("trainer", f"{ROLES}:SimTrainer", {"world": stage.world})
        assert (await call(again, "load", saved.path)).version == 1
        with pytest.raises(DataError, match="no checkpoint at nowhere"):
            await call(again, "load", "nowhere")

    on_stage(scenario)


def test_a_trainer_killed_during_a_checkpoint_leaves_none() -> None:
    async def scenario(stage: Stage) -> None:
        await call(stage.trainer, "checkpoint", "run")
        async with asyncio.TaskGroup() as group:
            saving = group.create_task(expect_death(call(stage.trainer, "await_saved")))
            await asyncio.sleep(0.1)
            assert not saving.done()
            stage.trainer.kill()
        await asyncio.sleep(10.0)
        assert stage.world.checkpoints == {}

    on_stage(scenario)


async def expect_death(command: Awaitable[Any]) -> None:
    with pytest.raises(WorkerDied):
        await command


def test_a_slow_worker_takes_longer_for_the_same_work() -> None:
    async def scenario(stage: Stage) -> float:
        return (await call(stage.trainer, "step", batch(0))).step_s

    slow = millrace_sim.Faults(
        slow=(millrace_sim.Slow("trainer", factor=3.0), millrace_sim.Slow("replica", factor=9.0))
    )
    assert on_stage(scenario, faults=slow) == pytest.approx(3.0 * on_stage(scenario))


# ---------------------------------------------------------------- environment


def test_prompts_and_scores_are_pure_functions_of_their_ids() -> None:
    workload = millrace_sim.Workload(failed_fraction=0.2, abstained_fraction=0.1, bad_prompt_fraction=0.25)
    requests = [ScoreRequest(tid, 0, [1, 2], Finish.STOP) for tid in range(400)]

    async def answers(order: int) -> tuple[list[Any], list[Any]]:
        environment = SimRewardWorker(seed=3, workload=workload)
        prompts = await environment.prompts(list(range(400))[::order])
        scores = [pair async for pair in environment.score(requests[::order])]
        assert [tid for tid, _ in scores] == [r.trajectory_id for r in requests[::order]]
        return prompts[::order], [score for _, score in scores][::order]

    prompts, scores = millrace_sim.run(answers(1), seed=0)
    assert millrace_sim.run(answers(-1), seed=1) == (prompts, scores)
    assert 0.18 < sum(not isinstance(p, Prompt) for p in prompts) / 400 < 0.32
    assert 0.14 < sum(isinstance(s, Failed) for s in scores) / 400 < 0.26
    values = [score.value for score in scores if isinstance(score, Scored)]
    assert set(values) == {0.0, 1.0}
    assert 0.4 < sum(values) / len(values) < 0.6
