"""An environment: what answers the model between its turns, and what can end its episode before it does."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from millrace.config.tables.task import OF_THE_SUM, EnvironmentRewardSection
from millrace.core.turns.turn_bounds import NO_BOUNDS, TurnBounds
from millrace.core.types import Finish, ScoreRequest
from millrace.rewards.scores import finite
from millrace.tasks.rows import Row

Message = dict[str, str]
"""`role`, `content`, and perhaps the `name` of a tool. Other keys are not shown to the model."""

_WORD = re.compile(r"[\w.-]{1,64}")


class Ids(tuple[int, ...]):
    """Token ids in place of a text. `bounds`: of the turn that follows them."""

    bounds: TurnBounds

    def __new__(cls, ids: Iterable[int], bounds: TurnBounds = NO_BOUNDS) -> Ids:
        self = super().__new__(cls, ids)
        self.bounds = bounds
        return self


class SampledTurn(msgspec.Struct, frozen=True):
    """One turn of the model. `logprobs`: of sampling, in nats; empty: not known."""

    ids: list[int]
    logprobs: list[float]
    finish: Finish


class Observation(msgspec.Struct, frozen=True):
    """The answer to one turn; the model has another turn. `text`: a text, or chat messages with `role` and
    `content`. `reward`: of the turn that is answered; None: the turn has none. Finite numbers in `metrics`
    become metrics of the trajectory. Several rewards by name: the turn has their sum, and each sum over the
    turns is a metric of that name. `after`: the number of the turn that the text follows, from 1 on; None:
    the turn that is answered. The model sees nothing of later turns. 0: the text, or the messages, stand in
    place of the prompt and of all turns."""

    text: str | list[Message] | Ids
    reward: float | dict[str, float] | None = None
    metrics: dict[str, float] = {}
    after: int | None = None


class Done(msgspec.Struct, frozen=True):
    """The end of the episode. `reward`: of the last turn. The reward of a trajectory is the sum over its
    turns. None: the environment has no opinion, and the trajectory is rejected. Names: as in
    `Observation`."""

    reward: float | dict[str, float] | None
    metrics: dict[str, float] = {}


class OverBudget(msgspec.Struct, frozen=True):
    """The answer of a form that counts what a budget bounds: the turn wants more of it. `budget`: its name in
    `ended_by_NAME`."""

    budget: str
    metrics: dict[str, float] = {}
    reward: None = None


Answer = Observation | Done | OverBudget


class EpisodeLost(Exception):
    """A process of the episode was killed. The episode may be repeated."""


class Environment(Protocol):
    """One episode. A method has `reward.timeout_s`.

    What makes environments may have `recovery`, which says what follows if the process of an episode is lost.
    "replayed": another process repeats the episode, and every observation must be equal. "restored": another
    process goes on from the last `snapshot`. "failed": the trajectory fails. An environment may also have
    `close()`, and `cut_off()`: the reward that is added if a budget ends the episode. With `wants_ids`,
    `step` gets a `SampledTurn` in place of a text.
    """

    def reset(self, row: Row) -> str | list[Message] | Ids | None:
        """Begin. A text, or messages, follow the prompt of the row. The members of a group share their
        prompt, so these depend on the row alone."""

    def step(self, action: Any) -> Observation | Done | OverBudget | str:
        """Answer the text of one turn. A plain text is an `Observation`."""

    def snapshot(self) -> bytes:
        """What `restore` needs, after an answer. Needed if the episode can be restored."""

    def restore(self, row: Row, snapshot: bytes) -> None:
        """Begin in place of `reset`, as it was at the snapshot."""


def to_answer(name: str, returned: Any, turns: int) -> Answer:
    """Judge what `step` returned after so many turns. Raises: ValueError: no observation and no end."""
    if isinstance(returned, str):
        return Observation(returned)
    if isinstance(returned, OverBudget):
        return returned
    if not isinstance(returned, Observation | Done):
        raise ValueError(
            f"{name} returned a {type(returned).__name__}: `step` returns a text, an Observation or a Done"
        )
    if isinstance(returned, Observation) and not _can_be_seen(returned.text):
        kind = type(returned.text).__name__
        raise ValueError(
            f"{name} returned an observation of type {kind}: a text, or messages {{role, content}} of texts"
        )
    if isinstance(returned, Observation) and not _is_turn(returned.after, turns):
        raise ValueError(
            f"{name} returned an observation after turn {returned.after!r}: 0 to {turns}, or None"
        )
    if not isinstance(returned.metrics, Mapping):
        raise ValueError(f"{name} returned metrics of type {type(returned.metrics).__name__}: a dict")
    _refuse_reward(name, returned.reward)
    return returned


def by_name(reward: float | dict[str, float] | None) -> dict[str, float]:
    """The rewards of an answer; a single one has no name."""
    rewards = reward if isinstance(reward, Mapping) else {"": reward or 0.0}
    return {name: float(value) for name, value in rewards.items()}


def _refuse_reward(name: str, reward: Any) -> None:
    rewards = reward if isinstance(reward, Mapping) else {"": 0.0 if reward is None else reward}
    for key, value in rewards.items():
        if finite(value) is None:
            which = f"{key} " if key else ""
            raise ValueError(
                f"{name} returned a reward {which}of type {type(value).__name__}: a finite number"
            )
    taken = [key for key in rewards if not isinstance(key, str) or key.startswith((*OF_THE_SUM, "ended_by_"))]
    if taken or not rewards:
        raise ValueError(f"{name} returned a dict of rewards with the names {list(rewards)}: use other ones")


def to_begin(name: str, returned: Any) -> str | list[Message] | Ids:
    """Judge what `reset` returned. Raises: ValueError: neither text nor messages nor None."""
    if isinstance(returned, Ids):
        return returned
    if returned is None or returned == []:
        return ""
    if not _can_be_seen(returned):
        raise ValueError(
            f"{name}: `reset` returned a {type(returned).__name__}: a text or messages that follow the "
            "prompt, or None"
        )
    keys = ("role", "name", "content")
    return (
        returned if isinstance(returned, str) else [{k: one[k] for k in keys if k in one} for one in returned]
    )


def length(observation: str | list[Message] | Ids) -> int:
    """Characters of an observation, or token ids."""
    if isinstance(observation, str | Ids):
        return len(observation)
    return sum(len(one["content"]) for one in observation)


def _can_be_seen(observation: Any) -> bool:
    if isinstance(observation, str | Ids):
        return True
    return isinstance(observation, list) and bool(observation) and all(map(_is_message, observation))


def _is_turn(after: Any, turns: int) -> bool:
    return after is None or (type(after) is int and 0 <= after <= turns)


def _is_message(one: Any) -> bool:
    """The words of a message become special tokens and text of the template, so they are plain words."""
    words = (one.get("role"), one.get("name", "none")) if isinstance(one, Mapping) else (None,)
    return all(isinstance(word, str) and _WORD.fullmatch(word) for word in words) and isinstance(
        one.get("content"), str
    )


TOKENS, TURNS, CONTEXT = "tokens", "turns", "context"
TOOL_CALLS, SAMPLED, SECONDS = "tool_calls", "sampled", "seconds"


@dataclass(frozen=True)
class Budgets:
    """Named as in the metrics `ended_by_NAME`. None: there is no such budget. Sampled tokens of one turn and
    all tokens always have one, and the form of tools counts calls."""

    turns: int
    tool_calls: int | None = None
    episode_tokens: int | None = None
    episode_s: float | None = None

    @classmethod
    def of(cls, config: EnvironmentRewardSection) -> Budgets:
        return cls(config.turns, config.tool_calls, config.episode_tokens, config.episode_s)

    @property
    def names(self) -> list[str]:
        own = {TOOL_CALLS: self.tool_calls, SAMPLED: self.episode_tokens, SECONDS: self.episode_s}
        return [TOKENS, TURNS, CONTEXT, *(name for name, most in own.items() if most is not None)]

    def used_up(self, request: ScoreRequest, turns: int, seconds: float) -> str:
        """The budget that is used up after a turn was answered; empty: none is."""
        sampled = sum(stop - start for start, stop, is_sampled in request.turns if is_sampled)
        if self.episode_tokens is not None and sampled >= self.episode_tokens:
            return SAMPLED
        if request.finish is Finish.LENGTH:
            return TOKENS
        if turns >= self.turns:
            return TURNS
        return SECONDS if self.episode_s is not None and seconds >= self.episode_s else ""
