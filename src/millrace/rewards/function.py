"""The user's reward function: loads the function, and calls it with the columns that it names."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any

from millrace.config.carried import is_carried_object
from millrace.config.objects import load_function
from millrace.core.errors import ConfigError, RewardError
from millrace.rewards.signatures import Kind, make_signature, refuse_foreign
from millrace.tasks.rows import Row


class FunctionReward:
    """`def reward(completion, answer, **columns)`, plain or `async`.

    The function is called by keyword with `completion` (text), `answer` (the reference, or None) and columns
    of the row: the columns that its signature names, or all columns if it takes `**columns`.
    `rewards.signatures` has the other signatures.

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
