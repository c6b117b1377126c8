"""An environment: what answers the model between its turns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from millrace.environments.rows import Row
from millrace.environments.scores import finite

Message = dict[str, str]
"""`role`, `content`, and perhaps the `name` of a tool. Other keys are not shown to the model."""

_WORD = re.compile(r"[\w.-]{1,64}")


class Observation(msgspec.Struct, frozen=True):
    """The answer to one turn; the model has another turn. `text`: a text, or chat messages with `role` and
    `content`. `reward`: of the turn that is answered; None: the turn has none. Finite numbers in `metrics`
    become metrics of the trajectory.

    `after`: the number of the turn that the text follows, from 1 on; None: the turn that is answered. The
    model sees nothing of later turns. 0: the text, or the messages, stand in place of the prompt and of all
    turns.
    """

    text: str | list[Message]
    reward: float | None = None
    metrics: dict[str, float] = {}
    after: int | None = None


class Done(msgspec.Struct, frozen=True):
    """The end of the episode. `reward`: of the last turn. The reward of a trajectory is the sum over its
    turns. None: the environment has no opinion, and the trajectory is rejected."""

    reward: float | None
    metrics: dict[str, float] = {}


class Environment(Protocol):
    """One episode. A method has `reward.timeout_s`.

    What makes environments may have `recovery`, which says what follows if the process of an episode is lost.
    "replayed": another process repeats the episode, and every observation must be equal. "failed": the
    trajectory fails. An environment may also have `close()`, and `cut_off()`: the reward that is added if a
    budget ends the episode.
    """

    def reset(self, row: Row) -> str | None:
        """Begin. A text follows the prompt of the row. The members of a group share their prompt, so the text
        depends on the row alone."""

    def step(self, action: str) -> Observation | Done | str:
        """Answer the text of one turn. A plain text is an `Observation`."""


def to_answer(name: str, returned: Any, turns: int) -> Observation | Done:
    """Judge what `step` returned after so many turns. Raises: ValueError: no observation and no end."""
    if isinstance(returned, str):
        return Observation(returned)
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
    if returned.reward is not None and finite(returned.reward) is None:
        raise ValueError(
            f"{name} returned a reward of type {type(returned.reward).__name__}: a finite number"
        )
    return returned


def to_text(name: str, returned: Any) -> str:
    """Judge what `reset` returned. Raises: ValueError: neither a text nor None."""
    if returned is None or isinstance(returned, str):
        return returned or ""
    raise ValueError(
        f"{name}: `reset` returned a {type(returned).__name__}: a text that follows the prompt, or None"
    )


def length(observation: str | list[Message]) -> int:
    """Characters of an observation."""
    return (
        len(observation) if isinstance(observation, str) else sum(len(one["content"]) for one in observation)
    )


def _can_be_seen(observation: Any) -> bool:
    if isinstance(observation, str):
        return True
    return isinstance(observation, list) and bool(observation) and all(map(_is_message, observation))


def _is_turn(after: Any, turns: int) -> bool:
    return after is None or (isinstance(after, int) and 0 <= after <= turns)


def _is_message(one: Any) -> bool:
    """The words of a message become special tokens and text of the template, so they are plain words."""
    words = (one.get("role"), one.get("name", "none")) if isinstance(one, Mapping) else (None,)
    return all(isinstance(word, str) and _WORD.fullmatch(word) for word in words) and isinstance(
        one.get("content"), str
    )
