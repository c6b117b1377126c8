"""The forms in which classes of environments are written, each as the one protocol `Environment`.

A class has the form that its methods say.

Source: TRL 1.16 (`environment_factory`) and SkyRL-Gym 0.4 (`BaseTextEnv`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from millrace.config.objects import load_function
from millrace.config.tables.task import EnvironmentRewardSection
from millrace.conversations.call_reader import CallReader
from millrace.core.errors import ConfigError, RewardError
from millrace.episodes.environment import Environment
from millrace.episodes.own_form import OwnEnvironment
from millrace.episodes.skyrl_form import SkyRlEnvironment
from millrace.episodes.tool_form import ToolEnvironment
from millrace.episodes.tools import NO_TOOLS, RESTORING, find_tools


class Form:
    """Makes the episodes of a user's class.

    Args:
        kind: the user's class.
        path: its path, for errors.
        prompt: the column with the prompt.
        reader: of the model's turns.
        shown: the chat template shows tools to the model.
    """

    def __init__(
        self,
        kind: type,
        path: str,
        config: EnvironmentRewardSection,
        *,
        prompt: str,
        reader: CallReader,
        shown: bool,
    ) -> None:
        self.recovery = getattr(kind, "recovery", "replayed")
        self.schemas: Sequence[dict[str, Any]] = ()
        self._make: Callable[[], Environment]
        if _of_tools(kind):
            tools = find_tools(kind, path)
            self._make = partial(
                ToolEnvironment, kind, path, tools, config=config, reader=reader, shown=shown
            )
            self.schemas = [tool.schema for tool in tools.values()] if shown else ()
        elif config.tool_calls is not None:
            raise RewardError(f"`reward.tool_calls`: `{path}` is no class of tools, so nothing counts calls")
        elif hasattr(kind, "reset"):
            self._make = partial(OwnEnvironment, kind)
        else:
            self._make = partial(SkyRlEnvironment, kind, path, prompt, config.turns)

    def __call__(self) -> Environment:
        return self._make()


def _of_tools(kind: Any) -> bool:
    """Whether a class is of tools: `reset` takes columns by name, or none. A tool may be called `step`."""
    if not hasattr(kind, "reset"):
        return False
    parameters = list(inspect.signature(kind.reset).parameters.values())
    by_name = len(parameters) == 1 or any(one.kind is one.VAR_KEYWORD for one in parameters)
    return by_name or not hasattr(kind, "step")


def load_environment(path: str) -> tuple[type, str | None]:
    """The class at `file.py:name` or `package.module:name`, and its file.

    Raises: RewardError: the class cannot be loaded, or has none of the forms."""
    try:
        found, file = load_function("reward.path", path)
    except ConfigError as error:
        raise RewardError(str(error)) from error
    kind: Any = found
    if not inspect.isclass(kind):
        raise RewardError(f"`reward.path` ({path}) is a {type(kind).__name__}: an environment is a class")
    public = {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}
    begins = "reset" in public or {"init", "step"} <= public
    if not begins or not public.difference(NO_TOOLS):
        methods = ", ".join(sorted(public)) or "(none)"
        raise RewardError(
            f"`reward.path` ({path}) has the public methods {methods}: an environment is a class "
            "with `reset(row)` and `step(action)`; with `reset(**row)` and tools as methods (TRL); or "
            "with `init(prompt)` and `step(action)` (SkyRL-Gym)\n  See docs/turns.md."
        )
    recovery = getattr(kind, "recovery", "replayed")
    if recovery not in ("replayed", "restored", "failed"):
        raise RewardError(f"`{path}`: `recovery` is {recovery!r}: use 'replayed', 'restored' or 'failed'")
    if recovery == "restored" and not public.issuperset(RESTORING):
        raise RewardError(
            f"`{path}`: `recovery` is 'restored': add methods `snapshot()` and `restore(row, snapshot)`"
        )
    return kind, file
