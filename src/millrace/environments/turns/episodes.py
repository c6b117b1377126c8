"""The episodes of one worker: answers turns, and repeats an episode that another process has begun."""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace

from millrace.config.tables.task import EnvironmentRewardSection, Task
from millrace.core.completion.columns import token_array
from millrace.core.completion.forks import num_seen
from millrace.core.errors import DeadlineExceeded
from millrace.core.types import Abstain, Failed, Finish, Observed, Score, Scored, ScoreRequest
from millrace.environments.chat import is_messages
from millrace.environments.rows import Row, find_column
from millrace.environments.scores import encodable, finite, raised, to_score
from millrace.environments.tasks import Task as Rows
from millrace.environments.tasks import first_usable
from millrace.environments.turns.bridge import Bridge, ChatBridge, PlainBridge
from millrace.environments.turns.environment import (
    Done,
    Environment,
    Observation,
    length,
    to_answer,
    to_text,
)
from millrace.environments.turns.forms import Form, load_environment

T = TypeVar("T")

THREADS = 64
"""Calls at once: as many as the controller sends (`controller.turns.episode.LANES`)."""

LOST_MAX = THREADS // 2
"""Calls over their deadline that a worker survives."""

BUDGETS = "tokens", "turns", "context"
"""What can end an episode before its environment does: the tokens of one turn, turns, all tokens."""

LIVE_MAX = 4096
"""Episodes that a worker keeps between their turns. The one that waited longest is dropped, and repeated."""


class ReplayError(Exception):
    """A repeated episode differs from the recorded one."""


class _Episode:
    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.turns = 0
        self.reward = 0.0

    def close(self) -> None:
        with suppress(Exception):
            getattr(self.environment, "close", lambda: None)()


class Episodes:
    """`turns_max`: turns of an episode. Each call of an environment has a thread. A call that is over
    `timeout_s` fails, and its thread is lost. `LOST_MAX` lost threads end the worker, and before there are
    still `THREADS` others."""

    def __init__(
        self,
        kind: Callable[[], Environment],
        *,
        name: str,
        file: str | None,
        bridge: Bridge,
        decode: Callable[[list[int]], str],
        turns_max: int,
        timeout_s: float,
    ) -> None:
        self._kind, self._name, self._file, self._bridge, self._decode = kind, name, file, bridge, decode
        self._turns_max, self._timeout_s = turns_max, timeout_s
        self._threads = ThreadPoolExecutor(THREADS + LOST_MAX, "environment")
        self._lost = 0
        self._recovery = getattr(kind, "recovery", "replayed")
        self.schemas: Sequence[dict[str, Any]] = getattr(kind, "schemas", ())
        self._live: OrderedDict[int, _Episode] = OrderedDict()

    async def answered(self, request: ScoreRequest, row: Row) -> Score | Observed:
        """As `answer`. Raises: DeadlineExceeded: too many environments are over their deadline."""
        return await self._in_time(partial(self.answer, request, row))

    async def begun(self, row: Row) -> str | Failed:
        """The text that follows the prompt of a row. Raises: as `answered`."""
        return await self._in_time(partial(self._first, row))

    async def _in_time(self, call: Callable[[], T]) -> T | Failed:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await loop.run_in_executor(self._threads, partial(_of_one_process, call))
        except TimeoutError:
            self._lost += 1
        reason = f"{self._name} took longer than `reward.timeout_s` ({self._timeout_s:g} s)"
        if self._lost >= LOST_MAX:
            raise DeadlineExceeded(reason)
        return Failed(reason)

    def _first(self, row: Row) -> str | Failed:
        episode = None
        try:
            episode = _Episode(self._kind())
            return to_text(self._name, episode.environment.reset(row))
        except BaseException as error:
            if isinstance(error, MemoryError):
                raise
            return raised(self._name, error, self._file)
        finally:
            if episode is not None:
                episode.close()

    def answer(self, request: ScoreRequest, row: Row) -> Score | Observed:
        """The answer to the last turn of the request. An exception of the environment becomes a Failed."""
        if not request.turns:
            request = replace(request, turns=[(0, len(request.tokens), True)])
        actions = [list(request.tokens[start:stop]) for start, stop, _ in request.turns[::2]]
        episode = self._live.pop(request.trajectory_id, None)
        try:
            if episode is None or episode.turns != len(actions) - 1:
                episode = self._repeated(row, actions[:-1], request)
            answer = self._step(episode, actions[-1])
            return self._judge(request, episode, actions, answer)
        except ReplayError as error:
            return Failed(str(error))
        except BaseException as error:  # not even SystemExit may leave the thread
            if isinstance(error, MemoryError):
                raise
            return raised(self._name, error, self._file)
        finally:
            if episode is not None and request.trajectory_id not in self._live:
                episode.close()

    def _repeated(self, row: Row, actions: list[list[int]], request: ScoreRequest) -> _Episode:
        if actions and self._recovery == "failed":
            raise ReplayError(f"{self._name}: the process of the episode is gone, and it cannot be repeated")
        episode = _Episode(self._kind())
        to_text(self._name, episode.environment.reset(row))
        forks = {fork.start: fork for fork in request.forks}
        for number, action in enumerate(actions, 1):
            answer = self._step(episode, action)
            start, stop, _ = request.turns[2 * number - 1]
            _, after, kept = forks.get(start, (start, None, 0))
            if (
                isinstance(answer, Done)
                or _follows(answer, request) != after
                or self._ids(actions[:number], answer)[kept:] != list(request.tokens[start:stop])
            ):
                raise ReplayError(
                    f"{self._name}: the repeated episode differs from the recorded one after turn "
                    f"{number}: its answers depend on more than the row and the actions\n"
                    '  Make them depend on these alone, or set `recovery = "failed"` in the class.'
                )
        return episode

    def _step(self, episode: _Episode, action: list[int]) -> Observation | Done:
        episode.turns += 1
        answer = to_answer(self._name, episode.environment.step(self._decode(action)), episode.turns)
        episode.reward += float(answer.reward or 0.0)
        return answer

    def _judge(
        self,
        request: ScoreRequest,
        episode: _Episode,
        actions: list[list[int]],
        answer: Observation | Done,
    ) -> Score | Observed:
        numbers = ((encodable(str(key)), finite(value)) for key, value in answer.metrics.items())
        metrics = {key: value for key, value in numbers if value is not None}
        if answer.reward is not None:
            metrics[f"turn_{episode.turns}"] = float(answer.reward)
        if isinstance(answer, Done):
            if answer.reward is None:
                return Abstain(f"{self._name} ended with a reward of None")
            return self._end(episode, metrics, "")
        if request.finish is Finish.LENGTH:
            return self._end(episode, metrics, "tokens")
        if episode.turns >= self._turns_max:
            return self._end(episode, metrics, "turns")
        after, room = _follows(answer, request), request.room
        if after is not None:
            seen = partial(num_seen, request.forks, num_prompt=request.num_prompt)
            room += seen(stop=len(request.tokens)) - (seen(stop=after) if after else 0)
        if not self._bridge.fits(length(answer.text), room):
            return self._end(episode, metrics, "context")
        tokens = self._ids(actions, answer)
        if len(tokens) >= room:
            return self._end(episode, metrics, "context")
        self._live[request.trajectory_id] = episode
        while len(self._live) > LIVE_MAX:
            self._live.popitem(last=False)[1].close()
        return Observed(token_array(tokens), metrics, after)

    def _ids(self, actions: list[list[int]], observation: Observation) -> list[int]:
        """What follows a turn, or stands in place of the prompt."""
        after = len(actions) if observation.after is None else observation.after
        text = observation.text
        return self._bridge.after(actions[after - 1], text) if after else self._bridge.whole(text)

    def _end(self, episode: _Episode, metrics: dict[str, float], budget: str) -> Score:
        """`budget`: what was used up; empty: the environment ended the episode."""
        if budget:
            episode.reward += getattr(episode.environment, "cut_off", float)()
        ended = {f"ended_by_{name}": float(name == budget) for name in BUDGETS}
        everything: dict[str, Any] = {
            "reward": episode.reward,
            "turns": float(episode.turns),
            **metrics,
            **ended,
        }
        score = to_score(self._name, everything)
        if isinstance(score, Scored) and budget:
            return Scored(score.value, score.metrics, truncated=True)
        return score


def _follows(observation: Observation, request: ScoreRequest) -> int | None:
    """How many tokens of the trajectory an observation follows; None: all that there are."""
    after = observation.after
    return after and request.turns[2 * after - 2][1]


def _of_one_process(call: Callable[[], T]) -> T:
    """The result of a call. A process that an environment forked ends here: it would answer twice."""
    process = os.getpid()
    try:
        return call()
    finally:
        if os.getpid() != process:
            os._exit(1)


def make_episodes(config: EnvironmentRewardSection, task: Task, rows: Rows, tokenizer: Any) -> Episodes:
    """The bridge is of chat if the first row is.

    Raises: ConfigError, RewardError: the environment cannot be loaded, or the chat template is none that
        turns can be appended to."""
    kind, file = load_environment(config.path)
    chat = task.chat or is_messages(find_column(first_usable(rows), rows.prompt))
    shown = chat and "tools" in str(getattr(tokenizer, "chat_template", None))
    form = Form(kind, config.path, config, prompt=rows.prompt, shown=shown)
    bridge: Bridge = PlainBridge(tokenizer)
    if chat:
        bridge = ChatBridge(tokenizer, config.role, dict(task.chat_arguments), form.schemas)
    return Episodes(
        form,
        name=config.path,
        file=file,
        bridge=bridge,
        decode=partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False),
        turns_max=config.turns,
        timeout_s=config.timeout_s,
    )
