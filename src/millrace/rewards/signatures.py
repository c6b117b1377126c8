"""Reward functions that were written for TRL or verl: what they are called with, and what they return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

from millrace.core.errors import RewardError
from millrace.tasks.rows import Row, find_column

Kind = Literal["millrace", "trl", "verl"]

TELLTALES: dict[str, Kind] = {"completions": "trl", "solution_str": "verl"}
"""Parameters that only functions of another signature have."""


class Signature(Protocol):
    def offered(self, columns: set[str]) -> set[str]:
        """The names of the arguments for a row of these columns."""

    def arguments(self, completion: str, answer: Any, columns: Row) -> dict[str, Any]: ...

    def score(self, returned: Any) -> Any:
        """What a function of our own would have returned. Raises: ValueError: it breaks the signature."""


class OwnSignature:
    """`def reward(completion, answer, **columns)`."""

    def offered(self, columns: set[str]) -> set[str]:
        return columns | {"completion", "answer"}

    def arguments(self, completion: str, answer: Any, columns: Row) -> dict[str, Any]:
        return {**columns, "completion": completion, "answer": answer}

    def score(self, returned: Any) -> Any:
        return returned


class TrlSignature:
    """`def reward(prompts, completions, **columns) -> list[float | None]`, with a batch of one completion.

    A prompt of chat messages has a completion of one message, as in TRL. Columns are lists of one value.
    What only TRL's trainer has, such as `completion_ids` and `trainer_state`, is not offered.

    Source: TRL 1.16, `GRPOTrainer._calculate_rewards`.
    """

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt

    def offered(self, columns: set[str]) -> set[str]:
        return columns - {"prompt", "completion"} | {"prompts", "completions"}

    def arguments(self, completion: str, answer: Any, columns: Row) -> dict[str, Any]:
        prompt = find_column(columns, self._prompt)
        chat = isinstance(prompt, list)
        lists = {name: [value] for name, value in columns.items() if name not in ("prompt", "completion")}
        said = [{"role": "assistant", "content": completion}] if chat else completion
        return {**lists, "prompts": [prompt], "completions": [said]}

    def score(self, returned: Any) -> Any:
        try:
            (value,) = returned
        except (TypeError, ValueError):
            raise ValueError(
                f"a function of TRL's signature returns a list with one number a completion, and for one "
                f"completion this returned {returned!r:.200}"
            ) from None
        return value


class VerlSignature:
    """`def compute_score(data_source, solution_str, ground_truth, extra_info=None)`; a number, or a dict with
    the key `score`. `ground_truth` is the reference answer, and the others are columns of the row.

    Source: verl 0.8, `NaiveRewardManager`.
    """

    def offered(self, columns: set[str]) -> set[str]:
        return columns & {"data_source", "extra_info"} | {"solution_str", "ground_truth"}

    def arguments(self, completion: str, answer: Any, columns: Row) -> dict[str, Any]:
        ours = {name: columns[name] for name in ("data_source", "extra_info") if name in columns}
        return {**ours, "solution_str": completion, "ground_truth": answer}

    def score(self, returned: Any) -> Any:
        if not isinstance(returned, dict):
            return returned
        if "score" not in returned:
            raise ValueError(f"a function of verl's signature returns a dict with `score`: {returned!r:.200}")
        return {"reward": returned["score"]} | {
            name: value for name, value in returned.items() if name not in ("score", "reward")
        }


def make_signature(kind: Kind, prompt: str) -> Signature:
    """`prompt`: the column with the prompt."""
    match kind:
        case "millrace":
            return OwnSignature()
        case "trl":
            return TrlSignature(prompt)
        case "verl":
            return VerlSignature()


def refuse_foreign(name: str, function: Callable[..., Any], kind: Kind, columns: Iterable[str]) -> None:
    """Raises: RewardError: the function looks like one of another signature than `kind`."""
    try:
        parameters = set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return  # `accepted` refuses it
    for parameter in sorted(parameters - set(columns)):
        other = TELLTALES.get(parameter, kind)
        if other != kind:
            raise RewardError(
                f"`{name}` takes `{parameter}`, as a reward function of {other} does; it would be called as "
                f'one of {kind}.\n  Set `reward.signature` to "{other}", or rename the parameter '
                "(docs/rewards.md, functions of TRL and verl)"
            )
