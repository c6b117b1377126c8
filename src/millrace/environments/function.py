"""The user's own reward function: finding it, and calling it with the columns it asks for."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from millrace.core.errors import RewardError
from millrace.environments.rows import Row

OWN_ARGUMENTS = ("completion", "answer")


class FunctionReward:
    """`def reward(completion, answer, **columns)`, plain or `async`.

    It is called by keyword with `completion` (text), `answer` (the reference, or None) and the row's
    columns; only with those that its signature names, or all of them if it takes `**columns`.

    Args:
        path: `file.py:name` or `package.module:name`. A file's directory becomes importable, as when
            Python runs that file.
        columns: names a row provides; a required parameter beyond them is an error now, not later.
    Raises:
        RewardError: it cannot be loaded, or its signature cannot be served.
    """

    def __init__(self, path: str, columns: Iterable[str]) -> None:
        self.name = path
        self._function, self.file = load_function(path)
        self.is_async = inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(
            getattr(self._function, "__call__", None)  # noqa: B004 - an object with `async def __call__`
        )
        self._accepted = _accepted(path, self._function, {*OWN_ARGUMENTS, *columns})

    def __call__(self, completion: str, answer: Any, columns: Row) -> Any:
        arguments = {**columns, "completion": completion, "answer": answer}
        if self._accepted is not None:
            arguments = {name: arguments[name] for name in self._accepted if name in arguments}
        return self._function(**arguments)


def load_function(path: str) -> tuple[Callable[..., Any], str | None]:
    """(function, the file that its errors are looked for in). Raises RewardError."""
    source, _, name = path.rpartition(":")
    if not source or not name:
        raise RewardError(f"`reward.path` ({path!r}) must be `file.py:name` or `package.module:name`")
    try:
        module = _from_file(source) if source.endswith(".py") else importlib.import_module(source)
    except RewardError:
        raise
    except (Exception, SystemExit) as error:
        raise RewardError(
            f"`reward.path` ({path!r}): importing {source} failed: {type(error).__name__}: {error}. "
            "Run it with python to see the whole traceback."
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        found = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise RewardError(
            f"`reward.path` ({path!r}): {source} has no function `{name}`; "
            f"it has {', '.join(found) or 'none'}"
        )
    return function, getattr(module, "__file__", None)


def _from_file(source: str) -> ModuleType:
    file = Path(source).resolve()
    if not file.is_file():
        raise RewardError(f"`reward.path`: no file {source} (looked in {Path.cwd()}): check the path")
    # A name of its own: `reward.py` must not hide, or be hidden by, an installed module `reward`.
    name = f"millrace_reward_{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise RewardError(f"`reward.path`: {source} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up here
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec.loader.exec_module(module)
    return module


def _accepted(path: str, function: Callable[..., Any], offered: set[str]) -> list[str] | None:
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
