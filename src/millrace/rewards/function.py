"""The user's reward function: loads the function, and calls it with the columns that it names. Functions
that were written for TRL or verl are called as they expect, and what they return is read as they mean it.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, Literal, Protocol

from millrace.config.carried import is_carried_object
from millrace.config.objects import load_function
from millrace.core.errors import ConfigError, RewardError
from millrace.tasks.rows import Row, find_column


class FunctionReward:
    """`def reward(completion, answer, **columns)`, plain or `async`.

    The function is called by keyword with `completion` (text), `answer` (the reference, or None) and columns
    of the row: the columns that its signature names, or all columns if it takes `**columns`.
    `rewards.function` has the other signatures.

    Args:
        path: `file.py:name` or `package.module:name`. A file's directory becomes importable, as when
            Python runs that file.
        columns: the columns of a row. A required parameter with another name is an error.
        prompt: the column with the prompt.
    Raises:
        RewardError: the function cannot be loaded, has a parameter that no column provides, or another
            signature.
    """

    def __init__(
        self, path: str, columns: Iterable[str], signature: Kind = "millrace", prompt: str = "prompt"
    ) -> None:
        self.name = path
        try:
            self._function, self.file = load_function("reward.path", path)
        except ConfigError as error:
            raise RewardError(str(error)) from error
        self.is_async = inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(
            getattr(self._function, "__call__", None)  # noqa: B004 - an object with `async def __call__`
        )
        if is_carried_object(path):
            self.name = getattr(self._function, "__qualname__", type(self._function).__name__)
        self._signature = make_signature(signature, prompt)
        self._accepted = accepted_columns(self.name, self._function, signature, columns)

    def __call__(self, completion: str, answer: Any, columns: Row) -> Any:
        arguments = self._signature.arguments(completion, answer, columns)
        if self._accepted is not None:
            arguments = {name: arguments[name] for name in self._accepted if name in arguments}
        returned = self._function(**arguments)
        if inspect.isawaitable(returned):
            return self._awaited(returned)
        return self._signature.score(returned)

    async def _awaited(self, returned: Awaitable[Any]) -> Any:
        return self._signature.score(await returned)


def accepted_columns(
    name: str, function: Callable[..., Any], signature: Kind, columns: Iterable[str]
) -> list[str] | None:
    """Names to pass to a reward function, or None for all.

    Raises: RewardError: it has a parameter that nothing provides, or another signature.
    """
    columns = set(columns)
    refuse_foreign(name, function, signature, columns)
    return accepted(name, function, make_signature(signature, "").offered(columns))


def accepted(path: str, function: Callable[..., Any], offered: Collection[str]) -> list[str] | None:
    """Names to pass, or None for all. Raises RewardError for a signature that cannot be served."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise RewardError(f"`{path}` has no signature ({error}): wrap it in a Python function") from error
    kinds = inspect.Parameter
    for parameter in parameters:
        required = parameter.default is kinds.empty and parameter.kind not in (
            kinds.VAR_KEYWORD,
            kinds.VAR_POSITIONAL,
        )
        if required and (parameter.kind is kinds.POSITIONAL_ONLY or parameter.name not in offered):
            raise RewardError(
                f"`{path}` needs `{parameter.name}`, which nothing provides. Offered, by keyword: "
                f"{', '.join(sorted(offered))}. Rename the parameter or give it a default."
            )
    if any(parameter.kind is kinds.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters if parameter.kind is not kinds.POSITIONAL_ONLY]


# ---------------------------------------------------------------- TRL's and verl's functions


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
