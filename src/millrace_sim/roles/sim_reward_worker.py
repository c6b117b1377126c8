"""A simulated reward worker: prompts and scores as pure functions of their ids."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

from millrace.core import clock
from millrace.core.completion.columns import token_array
from millrace.core.errors import OutOfMemory
from millrace.core.turns.packed import PackedRequest, pack_answer, unpack_request
from millrace.core.types import (
    Abstain,
    BadPrompt,
    Failed,
    Finish,
    Observed,
    Prompt,
    Score,
    Scored,
    ScoreRequest,
)
from millrace_sim.costs.interface import CostModel, Costs
from millrace_sim.costs.workload import Workload
from millrace_sim.virtual.faults import pace
from millrace_sim.virtual.seeded import uniform

FORKED = -1
"""The tokens of an observation that begins another sequence. Other tokens are their positions behind it."""


class SimRewardWorker:
    """A worker that keeps nothing but its agents, so any instance can serve any group. Of agents with prompts
    of their own, some ask something else when another worker starts them again.

    The worker scores one completion at a time. With `parallel` it simulates a pool of sandboxes that begin
    all requests of a call at once.
    """

    def __init__(
        self,
        *,
        seed: int,
        costs: CostModel = Costs(),
        workload: Workload = Workload(),
        parallel: bool = False,
    ) -> None:
        self._seed, self._costs, self._workload = seed, costs, workload
        self._parallel = parallel
        self._since_s: dict[int, float] = {}  # by trajectory: when its agent was started with the prompt
        self._agents = set[int]()  # trajectories whose agents are here

    async def prompts(
        self, group_ids: list[int], members: Sequence[Sequence[int]] = ()
    ) -> list[Prompt | BadPrompt]:
        for first, *others in members:
            self._since_s |= dict.fromkeys(others, clock.now())
            self._agents.add(first)
            await asyncio.sleep(self._start_s(first))
        await asyncio.sleep(self._costs.prompts_s * pace.get()())
        is_own = self._workload.start_s is not None and not members
        return [self._prompt(group_id, is_own=is_own) for group_id in group_ids]

    async def row_ids(self, group_ids: list[int]) -> list[str]:
        return [self._workload.row_id(group_id) for group_id in group_ids]

    async def forget(self, trajectory_ids: list[int]) -> dict[str, int]:
        self._agents.difference_update(trajectory_ids)
        return {}

    async def answer(self, packed: PackedRequest) -> Any:
        """It keeps no episode, so it wants all of every request."""
        request = unpack_request(packed)
        if request.known is not None:
            return None
        tid = request.trajectory_id
        if request.begins or (tid not in self._agents and self._asks_something_else(tid)):
            self._agents.add(tid)
            ready_s = self._since_s.pop(tid, clock.now()) + self._start_s(tid)
            await asyncio.sleep(max(0.0, ready_s - clock.now()))
            return pack_answer(self._begun(request))
        [(_, answer)] = [one async for one in self.score([request])]
        return pack_answer(answer)

    async def score(self, requests: list[ScoreRequest]) -> AsyncIterator[tuple[int, Score | Observed]]:
        spent_s = 0.0
        for request in requests:
            takes_s = self._takes_s(request)
            wait_s = max(0.0, takes_s - spent_s) if self._parallel else takes_s
            if wait_s:
                await asyncio.sleep(wait_s * pace.get()())
            spent_s += wait_s
            await self._misbehave(request)
            yield request.trajectory_id, self._observed(request) or self._score(request)

    def _start_s(self, trajectory_id: int) -> float:
        """Seconds until the agent of a trajectory makes its first request."""
        start_s = self._workload.start_s
        return 0.0 if start_s is None else start_s.draw(hash((self._seed, -1)), trajectory_id) * pace.get()()

    def _asks_something_else(self, trajectory_id: int) -> bool:
        """Where workers die all the time, a run of such agents alone would not end."""
        has_own = self._workload.start_s is not None and self._workload.own_share > 0
        return has_own and uniform(self._seed, "another agent", trajectory_id) < 0.2

    def _begun(self, request: ScoreRequest) -> Observed:
        """The prompt of an agent: a share of it is its own."""
        length = len(request.prompt)
        kept = round(length * (1 - self._workload.own_share))
        num_own = length - kept if length else self._workload.prompt_length(self._seed, request.group_id)
        if not num_own:
            return Observed(token_array(), begins=True)
        return Observed(token_array([FORKED] * num_own), after=0, kept=kept, begins=True)

    def _takes_s(self, request: ScoreRequest) -> float:
        if request.finish is Finish.TURN or len(request.turns) > 1:
            return self._workload.tool_s.draw(hash((self._seed, len(request.turns))), request.trajectory_id)
        return -self._costs.score_s * math.log(uniform(self._seed, "score latency", request.trajectory_id))

    def _observed(self, request: ScoreRequest) -> Observed | None:
        """The answer to a turn; None: the episode ends."""
        done = len(request.turns) // 2 + 1
        length = max(1, round(self._workload.observation_tokens / self._workload.quantum))
        if (
            request.finish is not Finish.TURN
            or done >= self._workload.num_turns(self._seed, request.trajectory_id)
            or length >= request.room
        ):
            return None
        u = uniform(hash((self._seed, done)), "fork", request.trajectory_id)
        if u < self._workload.forked_fraction:
            ends = [0, *(stop for _, stop, sampled in request.turns if sampled)]
            after = ends[int(len(ends) * u / self._workload.forked_fraction)]
            return Observed(token_array([FORKED] * length), after=after)
        forks = {fork.start for fork in request.forks}
        begin = [request.turns[0][0], *(stop for start, stop, _ in request.turns if start in forks)][-1]
        start = len(request.tokens) - begin
        return Observed(token_array(range(start, start + length)))

    async def _misbehave(self, request: ScoreRequest) -> None:
        """Misbehave if the workload says so. Later requests wait, or another worker scores them."""
        u, workload = uniform(self._seed, "misbehave", request.trajectory_id), self._workload
        if u < workload.unanswered_fraction:
            await asyncio.Event().wait()
        if u < workload.unanswered_fraction + workload.starved_fraction:
            raise OutOfMemory("simulated: the reward raised MemoryError")

    def _prompt(self, group_id: int, *, is_own: bool) -> Prompt | BadPrompt:
        """`is_own`: each episode begins with a prompt of its own."""
        row_id = self._workload.row_id(group_id)
        if uniform(self._seed, "bad prompt", group_id) < self._workload.bad_prompt_fraction:
            return BadPrompt(group_id, row_id, "simulated: the row is broken")
        length = 0 if is_own else self._workload.prompt_length(self._seed, group_id)
        return Prompt(group_id, row_id, token_array(range(length)), text=row_id)

    def _score(self, request: ScoreRequest) -> Score:
        """Pure in (seed, trajectory id)."""
        workload, u = self._workload, uniform(self._seed, "outcome", request.trajectory_id)
        if u < workload.failed_fraction:
            return Failed("simulated: the reward raised")
        if u < workload.failed_fraction + workload.abstained_fraction:
            return Abstain()
        pass_rate = workload.pass_rate(self._seed, request.group_id)
        right = uniform(self._seed, "reward", request.trajectory_id) < pass_rate
        value = 1.0 if right else 0.0
        return Scored(value, {"length": float(len(request.tokens))}, answer=f"{value:g}")
