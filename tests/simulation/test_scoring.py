"""The environment pool, when a worker is lost: it dies, falls silent or has no memory left."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

import millrace_sim
from millrace.config.tables.operation import Supervision
from millrace.config.tables.schedules import Millrace
from millrace.config.tables.task import GymRewardSection
from millrace.controller.fleet.live_reward_workers import RewardWorkersNeeded
from millrace.controller.reward_pool import RewardPool
from millrace.controller.supervisor import PlannedRestart, Supervisor, WorkerSpec
from millrace.controller.waits import Waits
from millrace.core import clock
from millrace.core.errors import DataError, DeadlineExceeded, MillraceError, OutOfMemory, WorkerDied, alone
from millrace.core.events import Events
from millrace.core.progress import Vitals
from millrace.core.pulse import Pulse
from millrace.core.turns.packed import pack_answer, unpack_request
from millrace.core.types import BadPrompt, Failed, Finish, Prompt, Scored, ScoreRequest
from millrace_sim.costs.interface import Costs
from millrace_sim.explore.invariants import Invariants
from millrace_sim.explore.worlds import small_config
from millrace_sim.simulation import Scenario, simulate


class Dies:
    name = "reward-worker-0"

    async def call(self, method, group_ids, members, *, timeout_s):
        await asyncio.sleep(1.0)
        raise WorkerDied(self.name)


class Serves:
    name = "reward-worker-1"

    async def call(self, method, group_ids, members, *, timeout_s):
        return [Prompt(group_id, "row", [1], "text") for group_id in group_ids]


def test_prompts_that_a_dying_worker_was_asked_for_come_from_another_at_once():
    async def main():
        news = Pulse()
        pool = RewardPool(news, Waits(), lambda *score: None, next_group_id=0, prefetch=4, timeout_s=9.0)
        async with asyncio.TaskGroup() as group:
            dying = group.create_task(_until_dead(pool))
            await asyncio.sleep(0.1)
            other = group.create_task(pool.session(Serves()))
            await news.wait(timeout_s=100.0)
            other.cancel()
            await dying
        return clock.now(), pool.next_prompt().group_id

    async def _until_dead(pool):
        with pytest.raises(PlannedRestart):
            await pool.session(Dies())

    assert millrace_sim.run(main(), seed=0) == (1.0, 0)


TIMEOUT_S, HEARTBEAT_S = 30.0, 10.0
HOLDER, KILLER = 3, 21  # a trajectory, a row


class Host:
    """A runtime whose workers score and make prompts, but for those in `trouble`: {"score": what happens at
    trajectory HOLDER, "prompts": what happens at row KILLER}, each an async function that never returns.
    The first `suspended` workers that score trajectory HOLDER are suspended."""

    def __init__(self, *, suspended=0, **trouble):
        self.trouble, self.epochs, self.asked, self.suspended = trouble, count(1), [], suspended

    async def spawn(self, name, target, kwargs=None, **how):
        return Worker(name, next(self.epochs), self)


class Worker:
    def __init__(self, name, epoch, host):
        self.name, self.epoch, self._host, self._blocked = name, epoch, host, False
        self.dead, self.suspended = asyncio.get_running_loop().create_future(), False

    async def call(self, method, *args, timeout_s):
        if method == "row_ids":
            return [f"rows:{group_id}" for group_id in args[0]]
        if method == "prompts":
            return await self._prompts(args[0], timeout_s)
        if self._blocked:  # no thread but the reward's has its turn
            await asyncio.sleep(timeout_s)
            raise DeadlineExceeded("no answer to the heartbeat")
        return Vitals(cpu_s=0.0, resident_bytes=0, disk=False, calls=[])

    async def _prompts(self, group_ids, timeout_s):
        self._host.asked.append(group_ids)
        if KILLER in group_ids and "prompts" in self._host.trouble:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._host.trouble["prompts"]()
            except TimeoutError:
                raise DeadlineExceeded("no answer") from None
        return [Prompt(group_id, "row", [1], "text") for group_id in group_ids]

    async def stream(self, method, *args):
        for request in args[0]:
            if request.trajectory_id == HOLDER and "score" in self._host.trouble:
                self._blocked = True
                await self._host.trouble["score"]()
            if request.trajectory_id == HOLDER and self._host.suspended:
                self._host.suspended -= 1
                self._blocked = self.suspended = True
                raise WorkerDied(await self.dead)
            yield request.trajectory_id, Scored(1.0)

    def kill(self):
        if not self.dead.done():
            self.dead.set_result("killed")


class Answers:
    """A handle whose answers are those of its stream of scores."""

    def call_then(self, method, packed, *, done):
        async def answered():
            try:
                answer = await self.answer(unpack_request(packed))
            except MillraceError as error:
                done(None, error)
            else:
                done(pack_answer(answer), None)

        task = asyncio.get_running_loop().create_task(answered())
        self.begun = [*getattr(self, "begun", []), task]

    async def answer(self, request):
        [(_, answer)] = [one async for one in self.stream("score", [request])]
        return answer


async def _serve(host, pool, until):
    """Keep one worker until `until()`; how many restarts that took."""
    policy = Supervision(
        heartbeat_timeout_s=HEARTBEAT_S, restarts=0, restart_window_s=1e6, backoff_s=0.0, spawn_timeout_s=1.0
    )
    supervisor = Supervisor(host, Events(clock.now, clock.wall), policy, Waits(), lambda *heartbeat: None)
    async with asyncio.TaskGroup() as group:
        spec = WorkerSpec("reward worker", "reward-worker-0", "a:B")
        keeper = group.create_task(supervisor.keep(spec, pool.session, pool.is_scoring))
        while not until():  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(1.0)
        keeper.cancel()
    return supervisor.restarts


def _scores(trouble=None, trajectories=6, *, suspended=0):
    """Every trajectory's score, and the restarts they took."""

    async def main():
        found = {}
        pool = _pool(found.__setitem__, prefetch=0)
        for trajectory_id in range(trajectories):
            pool.request(ScoreRequest(trajectory_id, trajectory_id, [], Finish.STOP))
        host = Host(suspended=suspended, **({"score": trouble} if trouble else {}))
        return found, await _serve(host, pool, lambda: len(found) == trajectories)

    return millrace_sim.run(main(), seed=0)


def _prompts(trouble, wanted=40):
    """The stream's first prompts, the calls that they took, and the restarts."""

    async def main():
        found, host = [], Host(prompts=trouble)
        pool = _pool(lambda *score: None, prefetch=4)

        def enough():
            while (prompt := pool.next_prompt()) is not None:
                found.append(prompt)
            return len(found) >= wanted

        restarts = await _serve(host, pool, enough)
        return found, host.asked, restarts

    return millrace_sim.run(main(), seed=0)


def _pool(on_score, *, prefetch):
    return RewardPool(Pulse(), Waits(), on_score, next_group_id=0, prefetch=prefetch, timeout_s=TIMEOUT_S)


async def _for_ever():
    await asyncio.sleep(1e9)


async def _dies():
    raise WorkerDied("killed by signal 9 (SIGKILL)")


async def _lacks_memory():
    raise OutOfMemory("raised MemoryError")


async def _slowly():
    await asyncio.sleep(TIMEOUT_S - 1.0)


async def _overdue():
    raise DeadlineExceeded("its worker saw the deadline itself")


@pytest.mark.parametrize("trouble", [_for_ever, _overdue])
def test_a_reward_that_keeps_heartbeats_from_being_answered_fails_alone_at_its_own_deadline(trouble):
    scores, restarts = _scores(trouble)
    assert scores.pop(HOLDER) == Failed("the reward did not answer within 30 s")
    assert all(score == Scored(1.0) for score in scores.values()) and restarts == 1


def test_a_worker_that_is_suspended_while_it_scores_is_replaced_and_what_it_scored_is_scored_again():
    scores, restarts = _scores(suspended=1)
    assert list(scores.values()) == [Scored(1.0)] * 6 and restarts == 1


def test_a_reward_that_suspends_its_own_worker_fails_its_trajectory_the_second_time():
    scores, restarts = _scores(suspended=9)
    assert "scoring killed its worker 2 times" in scores.pop(HOLDER).reason
    assert all(score == Scored(1.0) for score in scores.values()) and restarts == 2


def test_a_worker_is_not_lost_while_its_reward_is_within_its_deadline():
    scores, restarts = _scores(_slowly)
    assert all(score == Scored(1.0) for score in scores.values()) and restarts == 0


@pytest.mark.parametrize(("trouble", "reason"), [(_dies, "SIGKILL"), (_lacks_memory, "raised MemoryError")])
def test_a_trajectory_whose_scoring_costs_two_workers_fails_and_no_other(trouble, reason):
    scores, restarts = _scores(trouble)
    assert reason in scores.pop(HOLDER).reason
    assert all(score == Scored(1.0) for score in scores.values()) and restarts == 2


@pytest.mark.parametrize("trouble", [_for_ever, _dies, _lacks_memory])
def test_a_row_that_costs_two_workers_alone_is_skipped_and_no_other(trouble):
    prompts, asked, restarts = _prompts(trouble)
    assert [prompt.group_id for prompt in prompts] == list(range(len(prompts)))
    skipped = [prompt for prompt in prompts if isinstance(prompt, BadPrompt)]
    assert [(bad.group_id, bad.row_id) for bad in skipped] == [(KILLER, f"rows:{KILLER}")]
    assert "cost 2 reward workers" in skipped[0].reason
    assert restarts == 3 and asked.count([KILLER]) == 2 and len(asked[-1]) > 1


def test_rows_that_all_cost_their_workers_end_the_run_with_the_reason():
    class Killing(Host):
        async def spawn(self, name, target, kwargs=None, **how):
            worker = await super().spawn(name, target, kwargs, **how)
            worker._prompts = lambda *args: _dies()
            return worker

    async def main():
        await _serve(Killing(), _pool(lambda *score: None, prefetch=99), lambda: False)

    with pytest.raises(ExceptionGroup) as raised:
        millrace_sim.run(main(), seed=0)
    error = alone(raised.value)
    assert isinstance(error, DataError) and "8 rows in a row" in str(error)


# ---------------------------------------------------------------- as many workers as the queue needs


def scored(workers, workers_max, *, steps=12, score_s=0.6):
    reward = GymRewardSection(workers=workers, workers_max=workers_max)
    config = small_config(Millrace(), steps=steps, reward=reward)
    scenario = Scenario(config, costs=Costs(step_base_s=0.05, score_s=score_s))
    return simulate(scenario, Invariants(scenario))


def test_a_long_queue_gets_more_reward_workers_and_the_run_is_as_fast_as_with_all_of_them():
    grown, few, many = scored(1, 8), scored(1, None), scored(8, None)
    changes = [(event["before"], event["workers"]) for event in grown.of("reward_workers")]
    assert changes[0][0] == 1 and max(after for _, after in changes) > 3
    started = {event["name"] for event in grown.of("worker_started") if event["role"] == "reward worker"}
    assert len(started) == max(after for _, after in changes)
    assert grown.wall_s < few.wall_s / 2 and grown.wall_s < 1.3 * many.wall_s
    assert not few.of("reward_workers") and not many.of("reward_workers")
    assert grown.accounting.trained == grown.accounting.admitted


def test_reward_workers_that_are_not_needed_any_more_end_without_losing_a_score():
    outcome = scored(1, 8, steps=200, score_s=0.2)
    assert any(event["workers"] < event["before"] for event in outcome.of("reward_workers"))
    assert not outcome.of("worker_died")


def looks(needed, *rows):
    return [
        needed.look(now_s=now_s, busy=busy, waiting=waiting, score_s=1.0) for now_s, busy, waiting in rows
    ]


def test_reward_workers_become_more_at_once_and_fewer_after_a_while():
    needed = RewardWorkersNeeded(2, 9)
    assert looks(needed, (0, 0, 0), (1, 2, 6), (2, 5, 100), (3, 9, 0)) == [2, 5, 9, 9]
    assert looks(needed, (10, 1, 0), (20, 4, 0), (31, 3, 0)) == [9, 9, 9], "not for long enough"
    assert looks(needed, (33, 1, 0), (62, 3, 0), (64, 1, 0)) == [9, 9, 3], "the most since the last look back"
    assert looks(needed, (80, 0, 0), (93, 0, 0), (95, 0, 0)) == [3, 3, 2]
