"""An agent that is a function: its call in a process of its own."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from millrace.config.objects import load_function
from millrace.core.errors import ConfigError

ARGUMENTS = ("row", "base_url", "key")
RETURNED_BYTES_MAX = 64 * 1024


class AgentFunction:
    """The user's function `def solve(row, base_url, key)`, plain or `async`. It may leave arguments out.

    Raises: ConfigError: the function cannot be loaded, or needs another argument.
    """

    def __init__(self, path: str) -> None:
        self._function, _ = load_function("reward.agent.function", path)
        self._accepted = _accepted(path, self._function)

    def call(self, arguments: dict[str, Any], returned: int) -> int:
        """Call the function, write its value to the descriptor `returned`, and give the exit status."""
        try:
            value = self._function(**{name: arguments[name] for name in self._accepted})
            if inspect.isawaitable(value):
                value = asyncio.run(_awaited(value))
            _hand_over(value, returned)
            return 0
        except SystemExit as error:
            if error.code is None or isinstance(error.code, int):
                return (error.code or 0) & 0xFF
            sys.stderr.write(f"{error.code}\n")
        except BaseException as error:  # the process is the agent's own
            inner = error.__traceback__ and error.__traceback__.tb_next
            traceback.print_exception(error.with_traceback(inner))
            if getattr(error, "__notes__", None):  # the last line is the reason, and notes stand behind it
                sys.stderr.write(traceback.format_exception_only(error)[0])
        return 1


def _accepted(path: str, function: Callable[..., Any]) -> list[str]:
    """Names to pass. Raises: ConfigError."""
    kinds = inspect.Parameter
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(f"`{path}` has no signature ({error}): wrap it in a Python function") from None
    for name, parameter in parameters.items():
        variable = parameter.kind in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)
        if parameter.default is not kinds.empty or variable:
            continue
        if name not in ARGUMENTS or parameter.kind is kinds.POSITIONAL_ONLY:
            raise ConfigError(
                f"`{path}` needs `{name}`, which nothing provides. An agent is called by keyword with "
                f"{', '.join(ARGUMENTS)}. Rename the parameter or give it a default."
            )
    if any(parameter.kind is kinds.VAR_KEYWORD for parameter in parameters.values()):
        return list(ARGUMENTS)
    return [name for name in ARGUMENTS if name in parameters]


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _plain(value: Any) -> Any:
    """Numbers and arrays of NumPy and torch are those of Python."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _hand_over(value: Any, returned: int) -> None:
    """A value that cannot be handed over is left out, with a line in the agent's output."""
    try:
        data = json.dumps(value, default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        sys.stderr.write(f"millrace: the value that the agent returned is left out: {error}\n")
        return
    if len(data) > RETURNED_BYTES_MAX:
        sys.stderr.write(
            f"millrace: the value that the agent returned is left out: it has {len(data):,} bytes as JSON, "
            f"and at most {RETURNED_BYTES_MAX:,} are handed over. Write a file in the working directory.\n"
        )
        return
    while data:
        data = data[os.write(returned, data) :]
