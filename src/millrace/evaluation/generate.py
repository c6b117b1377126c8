"""Completions and episodes outside a run: an engine of this process generates, and a reward worker answers.

Worker, deadlines and budgets are those of a run, and so is what follows if an environment fails, hangs, or
ends its worker: see `RewardPool` and `Supervisor`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import NamedTuple

from millrace.config.freeze import recorded
from millrace.config.schema import Config
from millrace.controller.episode import LANES
from millrace.controller.evaluation.prompt_attempt import PromptAttempt, next_begins, next_turns
from millrace.controller.reward_pool import RewardPool
from millrace.controller.supervisor import Supervisor, WorkerSpec
from millrace.controller.waits import Waits
from millrace.core import clock
from millrace.core.completion.columns import token_array
from millrace.core.errors import alone
from millrace.core.events import Events
from millrace.core.pulse import Pulse
from millrace.core.types import BadPrompt, Finish, Observed, Prompt, Sampling, Score, Work
from millrace.evaluation.scoring import TARGET
from millrace.rollout.protocol import Engine
from millrace.runtime.local.local_runtime import LocalRuntime
from millrace.tasks.prepare import prepare_rows

# Every call numbers its trajectories from 0. A newer lease distinguishes them from those of earlier calls.
_leases = itertools.count()


class Completion(NamedTuple):
    """Token ids, and the reason why generation ended."""

    tokens: list[int]
    finish: Finish


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    n: int = 1,
    seed: int = 0,
    on_end: Callable[[], None] = lambda: None,
) -> list[list[Completion]]:
    """`n` completions of every prompt, in the order of the prompts.

    The engine must serve a version and be otherwise idle. Completion j of prompt i depends on the
    weights, the prompt, `sampling`, `seed` and (i, j) only. `on_end` is called at the end of each completion.
    """
    assert engine.version >= 0 and not engine.has_work, engine.load()
    lease = next(_leases)
    works = [
        Work(
            trajectory_id=index * n + attempt,
            group_id=index,
            lease=lease,
            prompt=token_array(prompt),
            tokens=token_array(),
            sampling=sampling,
            seed=seed,
        )
        for index, prompt in enumerate(prompts)
        for attempt in range(n)
    ]
    tokens: list[list[int]] = [[] for _ in works]
    ends: dict[int, Finish] = {}
    engine.submit(works)
    while engine.has_work or engine.has_finished:
        engine.step()
        for progress in engine.take_progress():
            tokens[progress.trajectory_id].extend(progress.columns.tokens)
            if progress.finish is not None:
                ends[progress.trajectory_id] = progress.finish
                on_end()
    completions = [Completion(each, ends[index]) for index, each in enumerate(tokens)]
    return [completions[start : start + n] for start in range(0, len(works), n)]


# ---------------------------------------------------------------- episodes


TICK_S = 1.0
PREFETCH = 16


class EpisodePlayer:
    """Attempts have an `index` that no earlier attempt of this player had. Make one with `episode_player`."""

    def __init__(self, config: Config, engine: Engine, first_group_id: int | None) -> None:
        self._config, self._engine = config, engine
        self._news, self.thread = Pulse(), ThreadPoolExecutor(1, "engine")
        self._live: dict[int, PromptAttempt] = {}
        self._on_end: Callable[[], None] = lambda: None
        self._lease = 0
        self.pool = RewardPool(
            self._news,
            Waits(),
            self._answer,
            next_group_id=first_group_id or 0,
            prefetch=0 if first_group_id is None else PREFETCH,
            timeout_s=config.reward.timeout_s,
            lanes=LANES,
        )

    async def prompt(self, group_id: int) -> Prompt | BadPrompt:
        """The prompt of a group, with what the environment adds. Groups are asked for in ascending order."""
        while True:
            prompt = self.pool.next_prompt()
            if prompt is None:
                await self._news.wait(timeout_s=TICK_S)
            elif prompt.group_id == group_id:
                return prompt

    async def play(
        self, attempts: Sequence[PromptAttempt], sampling: Sampling, seed: int, on_end: Callable[[], None]
    ) -> None:
        """Each attempt to its score. Completion `index` depends on the weights, the prompt, the answers,
        `sampling`, `seed` and `index` only. `on_end` is called at each score."""
        self._live, self._on_end = {one.index: one for one in attempts}, on_end
        engine, slots, busy, looked = self._engine, self._config.rollout.slots, 0, -1
        while self._live:
            if looked != self._news.count:  # another turn may begin
                for one in next_begins(self._live.values(), slots):
                    one.begin()
                    self._ask(one)
                looked, turns = self._news.count, next_turns(self._live.values(), slots - busy)
                self._lease, busy = self._lease + 1, busy + len(turns)
                if turns:
                    limits = sampling, seed, self._config.episode_tokens
                    engine.submit([one.lease(self._lease, *limits) for one in turns])
            if not (engine.has_work or engine.has_finished):
                await self._news.wait(timeout_s=TICK_S)
                continue
            await asyncio.get_running_loop().run_in_executor(self.thread, engine.step)
            for progress in engine.take_progress():
                one = self._live[progress.trajectory_id]
                if one.take(progress, answered=True):
                    busy -= 1
                    self._ask(one)
                    self._news.fire()

    def _ask(self, one: PromptAttempt) -> None:
        self.pool.request(one.score_request(one.index, self._config.rollout.max_sequence_tokens))

    def _answer(self, index: int, answer: Score | Observed) -> None:
        self._live[index].answer(answer)
        if not isinstance(answer, Observed):
            del self._live[index]
            self._on_end()
        self._news.fire()


@asynccontextmanager
async def episode_player(
    config: Config, engine: Engine, first_group_id: int | None = None
) -> AsyncIterator[EpisodePlayer]:
    """`engine` serves a version and is idle. Prompts begin with that of group `first_group_id`; None: no
    prompt is asked for.

    Raises: MillraceError: the reward worker cannot be started; every reward fails; no row makes a prompt."""
    prepare_rows(config.one_task)
    runtime, player = LocalRuntime(), EpisodePlayer(config, engine, first_group_id)
    spec = WorkerSpec("reward worker", "reward worker", TARGET, {"config": recorded(config)})
    events = Events(clock.now, clock.wall)
    supervisor = Supervisor(runtime, events, config.supervision, Waits(), lambda *_: None)
    try:
        async with asyncio.TaskGroup() as group:
            keeper = group.create_task(supervisor.keep(spec, player.pool.session, player.pool.is_scoring))
            yield player
            keeper.cancel()
    except ExceptionGroup as failures:
        raise alone(failures) from None
    finally:
        player.thread.shutdown()
        await runtime.close()
