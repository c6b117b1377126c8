"""Prompts of episodes: an agent may take long to start, and costs its own row alone."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

import millrace_sim
from millrace.controller.prompts import PROMPT_LANES
from millrace.controller.reward_pool import RewardPool
from millrace.controller.waits import Waits
from millrace.core import clock
from millrace.core.completion.columns import token_array
from millrace.core.errors import DeadlineExceeded, WorkerDied
from millrace.core.progress import Vitals
from millrace.core.pulse import Pulse
from millrace.core.types import BadPrompt, Failed, Finish, Prompt, Scored, ScoreRequest
from tests.simulation.test_scoring import HEARTBEAT_S, Answers, _serve

TIMEOUT_S, ROWS, KILLER = 60.0, 40, 5


class Host:
    """A runtime whose workers begin each episode in `begin_s`, and answer in a second. `trouble`: what
    happens at row KILLER. `deaths`: when the first worker dies for another reason."""

    def __init__(self, *, begin_s=20.0, trouble=None, death_s=None):
        self.begin_s, self.trouble, self.death_s = begin_s, trouble, death_s
        self.calls, self.most, self.workers = [], Counter(), 0
        self.answered_s, self.stops_at, self.begun = [], None, Counter()

    async def spawn(self, name, target, kwargs=None, **how):
        self.workers += 1
        return Worker(name, self.workers, self)


class Worker(Answers):
    suspended = stops = False

    def __init__(self, name, epoch, host):
        self.name, self.epoch, self._host, self._now, self.holds = name, epoch, host, 0, False
        self.dead = asyncio.get_running_loop().create_future()
        if epoch == 1 and host.death_s is not None:
            asyncio.get_running_loop().call_later(host.death_s, self.kill)

    async def call(self, method, *args, timeout_s):
        if method == "row_ids":
            return [f"rows:{group_id}" for group_id in args[0]]
        if method == "prompts":
            return await self._prompts(args[0], timeout_s)
        if self.holds:  # the interpreter
            await asyncio.sleep(timeout_s)
            raise DeadlineExceeded("no answer to the heartbeat")
        return Vitals(cpu_s=0.0, resident_bytes=0, disk=False, calls=[])

    async def _prompts(self, group_ids, timeout_s):
        host = self._host
        host.calls.append(group_ids)
        self._now += 1
        host.most[self.epoch] = max(host.most[self.epoch], self._now)
        try:
            async with asyncio.timeout(timeout_s):
                if KILLER in group_ids and host.trouble is not None:
                    await host.trouble(self)
                await self._unless_dead(host.begin_s * len(group_ids))
        except TimeoutError:
            raise DeadlineExceeded("no answer") from None
        finally:
            self._now -= 1
        return [Prompt(group_id, "row", token_array([1]), "text") for group_id in group_ids]

    async def stream(self, method, *args):
        for request in args[0]:
            self._host.begun[request.trajectory_id] += request.begins
            self.stops |= request.trajectory_id == self._host.stops_at
            await self._unless_dead(1.0)
            if not request.begins:
                self._host.answered_s.append(clock.now())
            yield request.trajectory_id, Scored(1.0)

    async def _unless_dead(self, seconds):
        done, _ = await asyncio.wait([self.dead], timeout=seconds)
        if done or (self.stops and await self.dead):
            raise WorkerDied("killed by signal 9 (SIGKILL)")

    def kill(self):
        """Its calls learn of it a moment later."""

        def end():
            if not self.dead.done():
                self.dead.set_result("killed")

        asyncio.get_running_loop().call_later(0.01, end)


async def kills(worker):
    worker.kill()


async def hangs(worker):
    await asyncio.sleep(1e9)


async def stops(worker):
    worker.stops = True


async def holds_the_interpreter(worker):
    worker.holds = True
    await asyncio.sleep(2.5 * HEARTBEAT_S)
    worker.holds = False


def prompts(host, wanted=ROWS, *, requests=0, group_size=None):
    """The first prompts, how many restarts they took, and when they were there."""

    async def main():
        taken = []
        pool = RewardPool(
            Pulse(),
            Waits(),
            lambda *_: None,
            next_group_id=0,
            prefetch=32,
            timeout_s=TIMEOUT_S,
            lanes=64,
            group_size=group_size,
        )

        def enough():
            while (prompt := pool.next_prompt()) is not None:
                taken.append(prompt)
            return len(taken) >= wanted

        for turn in range(requests):  # of earlier groups
            pool.request(ScoreRequest(-1 - turn, -1, token_array(), Finish.TURN))
        restarts = await _serve(host, pool, enough)
        return taken, restarts, clock.now()

    return millrace_sim.run(main(), seed=0)


@pytest.mark.parametrize("begin_s", [1.25, 20.0, 59.0])
def test_agents_that_start_slowly_start_beside_each_other_and_cost_no_worker(begin_s):
    host = Host(begin_s=begin_s)
    taken, restarts, took_s = prompts(host)
    assert [one.group_id for one in taken] == list(range(len(taken))) and restarts == 0
    assert all(len(ids) == 1 for ids in host.calls) and host.most[1] == PROMPT_LANES
    assert took_s < begin_s * (ROWS / PROMPT_LANES + 2)


@pytest.mark.parametrize("group_size", [None, 16, 100])
def test_turns_are_answered_while_agents_start(group_size):
    host = Host()
    prompts(host, requests=4, group_size=group_size)
    assert len(host.answered_s) == 4 and max(host.answered_s) < host.begin_s


def test_a_death_costs_no_row_and_no_other_one_waits_for_its_deadline():
    host = Host(begin_s=2.0, death_s=3.0)
    taken, restarts, took_s = prompts(host)
    assert restarts == 1 and not any(isinstance(one, BadPrompt) for one in taken)
    assert [one.group_id for one in taken] == list(range(len(taken))) and took_s < TIMEOUT_S


@pytest.mark.parametrize("trouble", [kills, hangs])
def test_a_row_that_costs_two_workers_alone_is_skipped_and_no_other(trouble):
    host = Host(begin_s=1.0, trouble=trouble)
    taken, restarts, _ = prompts(host)
    skipped = [one for one in taken if isinstance(one, BadPrompt)]
    assert [(bad.group_id, bad.row_id) for bad in skipped] == [(KILLER, f"rows:{KILLER}")]
    assert "cost 2 reward workers" in skipped[0].reason and restarts == 3


def test_the_begin_of_an_episode_may_hold_the_interpreter_until_its_deadline():
    host = Host(begin_s=1.0, trouble=holds_the_interpreter)
    taken, restarts, _ = prompts(host)
    assert restarts == 0 and not any(isinstance(one, BadPrompt) for one in taken)


def test_rows_that_are_lost_when_no_more_prompts_are_wanted_start_no_agents():
    async def main():
        host = Host(death_s=5.0)
        pool = RewardPool(
            Pulse(), Waits(), lambda *_: None, next_group_id=0, prefetch=4, timeout_s=TIMEOUT_S, lanes=64
        )
        asyncio.get_running_loop().call_later(2.0, pool.end_prompts)
        restarts = await _serve(host, pool, lambda: clock.now() >= 10.0)
        return restarts, host.calls

    assert millrace_sim.run(main(), seed=0) == (1, [[0], [1], [2], [3]])


def ahead(host, groups):
    """The prompts of groups of two, the restarts, and what the agents asked that started ahead."""

    async def main():
        taken = []
        scores = dict(next_group_id=0, prefetch=groups, timeout_s=TIMEOUT_S, lanes=64, group_size=2)
        pool = RewardPool(Pulse(), Waits(), lambda *_: None, **scores)

        def enough():
            while len(taken) < groups and (prompt := pool.next_prompt()) is not None:
                taken.append(prompt)
            return clock.now() > 8 * TIMEOUT_S

        restarts = await _serve(host, pool, enough)
        begins = [ScoreRequest(2 * i + 1, i, token_array(), Finish.TURN, begins=True) for i in range(groups)]
        return taken, restarts, {one.group_id: pool.request(one) for one in begins}

    return millrace_sim.run(main(), seed=0)


def test_a_row_that_stops_its_worker_is_skipped_though_agents_start_beside_it():
    taken, restarts, begun = ahead(Host(begin_s=1.0, trouble=stops), 16)
    assert [one.group_id for one in taken if isinstance(one, BadPrompt)] == [KILLER] and restarts == 3
    failed = [one for one in begun.values() if one is not None and isinstance(one.answer, Failed)]
    assert len(failed) <= 1  # one may begin in the same moment


def test_an_agent_that_stops_its_worker_ahead_of_need_fails_and_does_not_start_again():
    host = Host(begin_s=1.0)
    host.stops_at = 1
    taken, restarts, begun = ahead(host, 1)
    assert [one.group_id for one in taken] == [0] and restarts == 1
    assert isinstance(begun[0].answer, Failed) and host.begun[1] == 1
