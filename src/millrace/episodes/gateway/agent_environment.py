"""An agent as an environment: a turn of the model answers its call, and its next call is the observation."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from millrace.config.objects import load_function
from millrace.config.tables.generation import SamplingConfig
from millrace.config.tables.task import EnvironmentRewardSection, Task
from millrace.conversations.encoding import encodable
from millrace.core.errors import ConfigError, RewardError
from millrace.core.turns.end_ids import end_ids
from millrace.core.turns.turn_bounds import TurnBounds
from millrace.episodes.agents.agent_process import DIRECTORY, AgentEnd
from millrace.episodes.bridge import PlainBridge
from millrace.episodes.environment import (
    Budgets,
    Done,
    Environment,
    EpisodeLost,
    Ids,
    Observation,
    SampledTurn,
    by_name,
)
from millrace.episodes.episodes import Episodes
from millrace.episodes.forms import EpisodeLoop
from millrace.episodes.gateway.calls import Call, RefusedCall
from millrace.episodes.gateway.conversation import CallPlace, Conversation
from millrace.episodes.gateway.local_agents import LocalAgents, WorkersDirectory
from millrace.episodes.gateway.rendering import PlainRendering, Rendering, make_rendering
from millrace.episodes.gateway.replies import Replies
from millrace.episodes.gateway.sessions import PendingCall, Session
from millrace.episodes.harmony import turn_reader
from millrace.episodes.snapshots import Snapshots
from millrace.placement.model_directory import vocab_size
from millrace.rewards.function import accepted
from millrace.tasks.rows import Row
from millrace.tasks.tasks import Task as Rows
from millrace.tasks.tasks import first_usable

Reward = float | dict[str, float] | None


LINE_CHARACTERS = 120
STOP_MAX, STOP_CHARACTERS = 16, 256
"""Of one request. The record has them while the turn is generated."""


class AgentError(Exception):
    """An agent that died, hangs or never asked. Its episode fails."""


class RunningAgent(Protocol):
    """The process of one agent."""

    session: Session

    @property
    def time_s(self) -> float:
        """What its task permits it beside the time of the model."""

    def tests(self) -> float | None:
        """The reward of the tests of its task directory; None: it has none."""

    def conclude(self) -> None:
        """Answer its calls, later ones too, with a text that ends it."""

    def kill(self) -> None:
        """`wait` says when it is gone."""

    def wait(self, timeout_s: float) -> AgentEnd | None:
        """How it ended; None: it runs."""

    def close(self) -> None:
        """Kill what is left of it, and remove its directory."""


class AgentStarter(Protocol):
    """Starts agents. `Session.wake` is called when one ends."""

    def start(self, row: Row) -> RunningAgent: ...


class EpisodeEnd(NamedTuple):
    """What rewards an episode. `replies`: the texts of the turns. `tests`: see `RunningAgent`."""

    end: AgentEnd
    replies: list[str]
    tests: float | None


class AgentParts(NamedTuple):
    """What the episodes of a worker share.

    `score`: the user's reward of an episode. `timeout_s`: of one answer. `end_s`: after a budget has ended an
    episode. `max_tokens`, `stop`: most tokens of a turn, and the stop strings, of the run. `num_tokens`: of
    the vocabulary.
    """

    agents: AgentStarter
    rendering: Rendering | PlainRendering
    replies: Replies
    score: Callable[[EpisodeEnd, Row], Reward]
    timeout_s: float
    end_s: float
    max_tokens: int
    stop: tuple[str, ...]
    num_tokens: int


class AgentEnvironment:
    """One episode of an agent (see `turns.environment.Environment`)."""

    def __init__(self, parts: AgentParts) -> None:
        self._parts = parts
        self._conversation = Conversation(parts.rendering)
        self._agent: RunningAgent | None = None
        self._asked: tuple[PendingCall, CallPlace] | None = None
        self._texts = list[str]()
        self._spent_s, self._is_late, self._is_forgotten = 0.0, False, False

    def reset(self, row: Row) -> Ids:
        """The prompt of the first call.

        Raises: AgentError: the agent has ended or asks nothing. EpisodeLost: it was killed.
        """
        self._row = row
        self._agent = self._parts.agents.start(row)
        self._asked = None if self._is_forgotten else self._next(self._agent)
        if self._asked is None:
            end = self._agent.wait(0)
            if self._is_late:
                raise AgentError(f"the agent made no call within its task's {self._agent.time_s:g} s")
            _not_killed(end)
            raise AgentError(f"the agent ended without a call: {_said(end)}{_refused(self._agent)}")
        return Ids(self._asked[1].context, self._bounds(self._asked[0].call))

    def step(self, turn: SampledTurn) -> Observation | Done:
        """Raises: AgentError: the agent hangs, or its exit code is not 0. EpisodeLost: it was killed."""
        assert self._agent is not None and self._asked is not None
        pending, place = self._asked
        reply = self._parts.replies.make(f"turn{len(self._texts)}", pending.call, place.context, turn)
        self._conversation.add(pending.call, place, reply)
        self._texts.append(reply.text)
        if turn.finish == "length":  # the budget ends the episode: what is asked after is not counted
            ended = Observation(Ids([0]), metrics=self._metrics())
            pending.answer(reply)
            return ended
        pending.answer(reply)
        self._asked = self._next(self._agent)
        if self._asked is not None:
            call, place = self._asked[0].call, self._asked[1]
            ids = Ids(place.ids, self._bounds(call))
            return Observation(ids, metrics=self._metrics(), after=place.after)
        end = self._agent.wait(0) if self._is_late else _not_killed(self._agent.wait(0))
        if end is None or (end.exit_code != 0 and not self._is_late):
            raise AgentError(f"{_said(end)}{_refused(self._agent)}")
        return Done(self._score(end), self._metrics())

    def cut_off(self) -> float:
        """A budget has ended the episode: the agent gets no more turns, and ends.

        Raises: EpisodeLost: somebody else killed it."""
        assert self._agent is not None
        self._agent.conclude()
        end = _not_killed(self._agent.wait(self._parts.end_s))
        if end is None:
            self._agent.kill()
            end = self._agent.wait(self._parts.end_s)
        return sum(by_name(self._score(end)).values()) if end else 0.0

    def end_at_once(self) -> None:
        """Nobody waits for its answer. Any thread may call it, also while the agent starts."""
        self._is_forgotten = True
        if self._agent is not None:
            self._agent.kill()

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()

    def _next(self, agent: RunningAgent) -> tuple[PendingCall, CallPlace] | None:
        """The next call that can be answered, and its place; None: the agent or its task's time has ended."""
        began_s = time.monotonic()
        left_s = agent.time_s - self._spent_s
        asked = self._placed(agent, began_s + min(self._parts.timeout_s, left_s))
        self._spent_s += time.monotonic() - began_s
        if asked is None and agent.wait(0) is None:
            if self._spent_s < agent.time_s:
                raise AgentError(
                    f"the agent made no call for {self._parts.timeout_s:g} s, and has not ended\n"
                    f"  Raise `reward.timeout_s`, or see why it waits.{_refused(agent)}"
                )
            agent.kill()
            if agent.wait(self._parts.end_s) is None:
                raise AgentError(f"the agent was killed after its task's {agent.time_s:g} s, and goes on")
            self._is_late = True
        return asked

    def _placed(self, agent: RunningAgent, until_s: float) -> tuple[PendingCall, CallPlace] | None:
        while pending := agent.session.next_call(max(0.0, until_s - time.monotonic())):
            try:
                self._check(pending.call)
                return pending, self._conversation.place(pending.call)
            except RefusedCall as error:
                pending.refuse(error)
        return None

    def _check(self, call: Call) -> None:
        """Raises: RefusedCall: the run cannot do what the call wants."""
        if len(call.stop) > STOP_MAX or any(len(one) > STOP_CHARACTERS for one in call.stop):
            raise RefusedCall(
                f"there may be {STOP_MAX} stop strings of {STOP_CHARACTERS} characters each", field="stop"
            )
        if len(call.stop_ids) > STOP_MAX:
            raise RefusedCall(f"there may be {STOP_MAX} ids that end a turn", field="stop_token_ids")
        prompt = call.prompt if isinstance(call.prompt, list) else []
        for field, ids in ("prompt", prompt), ("stop_token_ids", call.stop_ids):
            if any(not 0 <= one < self._parts.num_tokens for one in ids):
                raise RefusedCall(f"token ids are from 0 to {self._parts.num_tokens - 1}", field=field)

    def _bounds(self, call: Call) -> TurnBounds:
        """What the call asks beyond what the run does to every turn."""
        asked, most = call.max_tokens or 0, self._parts.max_tokens
        stop = tuple(sorted({encodable(one) for one in call.stop} - {*self._parts.stop}))
        ids = tuple(sorted({*call.stop_ids} - {*self._parts.replies.end_ids}))
        return TurnBounds(asked if asked <= most else 0, stop, ids)

    def _score(self, end: AgentEnd) -> Reward:
        assert self._agent is not None
        return self._parts.score(EpisodeEnd(end, self._texts, self._agent.tests()), self._row)

    def _metrics(self) -> dict[str, float]:
        assert self._agent is not None
        forks = {f"forks_{cause}": float(count) for cause, count in self._conversation.forks.items()}
        counts = self._agent.session.counts
        late = {"agent_timed_out": 1.0} if self._is_late else {}
        return (
            forks
            | late
            | {
                "replies_unused": float(self._conversation.replies_unused),
                "retries": float(counts.joined + counts.replayed),
                "calls_refused": float(counts.refused),
                "calls_auxiliary": float(counts.auxiliary),
            }
        )


def _not_killed(end: AgentEnd | None) -> AgentEnd | None:
    """Raises: EpisodeLost: somebody else's SIGKILL ended the agent."""
    if end is not None and end.signal == "SIGKILL" and not end.killed:
        raise EpisodeLost(_said(end))
    return end


def _said(end: AgentEnd | None) -> str:
    if end is None:
        return "it runs"
    how = f"by {end.signal}" if end.signal is not None else f"with exit code {end.exit_code}"
    line = (end.last_words.strip().splitlines() or ["(none)"])[-1]
    return f"the agent ended {how}; its last words: {line[:LINE_CHARACTERS]}"


def _refused(agent: RunningAgent) -> str:
    """What may have made it fail: its client may hide the words, or ask again and again."""
    return f"\n  its last refused request: {agent.session.refusal}" if agent.session.refusal else ""


MARGIN = 0.05
"""Share of the deadline of an answer that is left for what is not waiting."""


class _Agents:
    """Makes environments."""

    wants_ids = True

    def __init__(self, parts: AgentParts, recovery: str) -> None:
        self._parts, self.recovery = parts, recovery

    def __call__(self) -> Environment:
        return cast(Environment, AgentEnvironment(self._parts))  # which is never restored from a snapshot


class AgentReward:
    """`def reward(end, replies, tests, **columns)`, plain or async, with the arguments that it names."""

    def __init__(self, path: str, rows: Rows) -> None:
        try:
            self._function, self.file = load_function("reward.path", path)
        except ConfigError as error:
            raise RewardError(str(error)) from error
        self._accepted = accepted(
            path, self._function, {**first_usable(rows), **dict.fromkeys(EpisodeEnd._fields)}
        )

    def __call__(self, end: EpisodeEnd, row: Row) -> Reward:
        arguments = {**row, **end._asdict()}
        if self._accepted is not None:
            arguments = {name: arguments[name] for name in self._accepted if name in arguments}
        loop = EpisodeLoop()
        try:
            return loop.result(self._function(**arguments))
        finally:
            loop.close(None)


def make_agent_episodes(
    config: EnvironmentRewardSection,
    task: Task,
    rows: Rows,
    tokenizer: Any,
    sampling: SamplingConfig,
    run_dir: Path | None,
    model_path: str,
) -> Episodes:
    """Raises: RewardError: the reward or the agent's function cannot be loaded."""
    agent = config.agent
    assert agent is not None
    reward = AgentReward(config.path, rows)
    model_ends = end_ids(model_path, tokenizer)
    rendering = make_rendering(tokenizer, task.chat_arguments, model_ends)
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else model_ends)}
    parts = AgentParts(
        LocalAgents(agent, rendering, None if run_dir is None else WorkersDirectory(run_dir / DIRECTORY)),
        rendering,
        Replies(tokenizer, rendering.style, end_ids=ends, stop=sampling.stop),
        reward,
        timeout_s=config.timeout_s * (1 - MARGIN) - agent.end_s,
        end_s=agent.end_s,
        max_tokens=sampling.max_tokens,
        stop=sampling.stop,
        num_tokens=int(min(len(tokenizer), vocab_size(Path(model_path)))),
    )
    return Episodes(
        _Agents(parts, agent.recovery),
        name=" ".join(agent.command) or str(agent.function),
        file=reward.file,
        bridge=PlainBridge(tokenizer),
        decode=turn_reader(tokenizer),
        budgets=Budgets.of(config),
        snapshots=Snapshots(run_dir, config.snapshot_bytes),
        timeout_s=config.timeout_s,
        trial=run_dir is None,
    )
