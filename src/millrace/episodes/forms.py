"""The forms in which classes of environments are written, each as the one protocol `Environment`.

A class has the form that its methods say.

Source: TRL 1.16 (`GRPOTrainer(environment_factory=...)`), where a turn without a call ends the episode; and
skyrl-gym 0.4.0 (`skyrl_gym/envs/base_text_env.py`), whose `env_config` is empty here, and whose
`postprocessed_action` changes nothing: tokens that were sampled stay.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from millrace.config.objects import load_function
from millrace.config.tables.task import EnvironmentRewardSection
from millrace.conversations.call_reader import CallReader
from millrace.conversations.tool_calls import Malformed, ToolCall
from millrace.core.errors import ConfigError, RewardError
from millrace.episodes.environment import TOOL_CALLS, Done, Environment, Message, Observation, OverBudget
from millrace.episodes.tools import NO_TOOLS, RESTORING, Tool, ToolError, WrongCall, find_tools, to_result
from millrace.rewards.scores import finite, shortened
from millrace.tasks.chat import is_messages
from millrace.tasks.rows import Row, find_column


class EpisodeLoop:
    """Waits for what async methods return, in one event loop for the whole episode: a client of the user's
    may stay open between two turns. No other episode has this loop, so none waits for its methods."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def result(self, returned: Any) -> Any:
        if not inspect.isawaitable(returned):
            return returned
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(_awaited(returned))

    def close(self, environment: Any) -> None:
        """Call `close` of the environment, if it has one."""
        with suppress(Exception):
            self.result(getattr(environment, "close", lambda: None)())
        if self._runner is not None:
            self._runner.close()


async def _awaited(returned: Awaitable[Any]) -> Any:
    return await returned


class OwnEnvironment:
    def __init__(self, kind: type) -> None:
        self._own, self._loop = kind(), EpisodeLoop()

    def reset(self, row: Row) -> Any:
        return self._loop.result(self._own.reset(row))

    def step(self, action: str) -> Any:
        return self._loop.result(self._own.step(action))

    def snapshot(self) -> Any:
        return self._loop.result(self._own.snapshot())

    def restore(self, row: Row, snapshot: bytes) -> None:
        self._loop.result(self._own.restore(row, snapshot))

    def close(self) -> None:
        self._loop.close(self._own)


class ToolEnvironment:
    """`reader`: of the model's turns. `shown`: the chat template shows the tools, and results are messages of
    role `tool`. Else a call is a line `name(...)`, and the results are one text.

    The reward is `get_reward()` at the end of the episode, or without that method the attribute `reward`. A
    method with a parameter gets the text of the last turn. A turn that has the call after `calls_max` calls
    ends the episode; its calls before that one are answered.
    """

    def __init__(
        self,
        kind: type,
        path: str,
        tools: dict[str, Tool],
        *,
        config: EnvironmentRewardSection,
        reader: CallReader,
        shown: bool,
    ) -> None:
        self._path, self._tools, self._reader, self._shown = path, tools, reader, shown
        self._schemas = {name: tool.schema["function"]["parameters"] for name, tool in tools.items()}
        self._characters_max, self._calls_left = config.result_characters, config.tool_calls or sys.maxsize
        self._own, self._loop = kind(), EpisodeLoop()
        self._text = ""
        self._counts: Counter[str] = Counter({"tool_errors": 0, "malformed": 0})

    def reset(self, row: Row) -> Any:
        parameters = inspect.signature(self._own.reset).parameters.values()
        any_name = any(one.kind is one.VAR_KEYWORD for one in parameters)
        names = {one.name for one in parameters}
        arguments = {name: value for name, value in row.items() if any_name or name in names}
        return self._loop.result(self._own.reset(**arguments))

    def step(self, action: str) -> Observation | Done | OverBudget:
        self._text = str(action)
        calls = self._reader.read(action, self._schemas).calls
        if not calls:
            return Done(self.cut_off(), self._metrics())
        results = [(call, self._answered(call)) for call in calls[: self._calls_left]]
        metrics, self._calls_left = self._metrics(), self._calls_left - len(calls)
        if self._calls_left < 0:
            return OverBudget(TOOL_CALLS, metrics)
        if not self._shown:
            return Observation("".join(f"{text}\n" for _, text in results), metrics=metrics)
        return Observation([self._message(call, text) for call, text in results], metrics=metrics)

    def cut_off(self) -> float:
        """Raises: ValueError: there is no reward, or it is no number."""
        if hasattr(self._own, "get_reward"):
            wanted = inspect.signature(self._own.get_reward).parameters
            reward = self._loop.result(self._own.get_reward(*[self._text][: len(wanted)]))
        elif hasattr(self._own, "reward"):
            reward = self._own.reward
        else:
            raise ValueError(
                f"{self._path} has neither a method `get_reward` nor an attribute `reward`: add one"
            )
        if (value := finite(reward)) is None:
            raise ValueError(f"{self._path}: the reward is a {type(reward).__name__}: a finite number")
        return value

    def snapshot(self) -> Any:
        data = self._loop.result(self._own.snapshot())
        return msgspec.msgpack.encode((data, self._text, self._calls_left, self._counts))

    def restore(self, row: Row, snapshot: bytes) -> None:
        data, self._text, self._calls_left, counts = msgspec.msgpack.decode(snapshot)
        self._counts = Counter(counts)
        self._loop.result(self._own.restore(row, data))

    def close(self) -> None:
        self._loop.close(self._own)

    def _answered(self, call: ToolCall | Malformed) -> str:
        """The result of a call, or what is wrong with it: the model may correct its call."""
        try:
            if isinstance(call, Malformed):
                raise WrongCall(call.reason)
            if call.name not in self._tools:
                raise WrongCall(f"there is no tool {call.name[:100]}: {', '.join(self._tools)}")
            self._counts[f"calls_{call.name}"] += 1
            returned = self._loop.result(self._tools[call.name].call(self._own, call))
            text, cut = to_result(returned, self._characters_max)
            self._counts["tool_results_cut"] += cut
            return text
        except ToolError as error:
            reason = str(error)
            self._counts["malformed"] += isinstance(error, WrongCall)
        except MemoryError:
            raise
        except Exception as error:  # of the user's tool
            reason = f"{type(error).__name__}: {shortened(error)}"
        self._counts["tool_errors"] += 1
        return f"Error: {reason}"

    def _metrics(self) -> dict[str, float]:
        """Counts since the begin of the episode."""
        return {name: float(count) for name, count in self._counts.items()}

    def _message(self, call: ToolCall | Malformed, text: str) -> Message:
        if isinstance(call, ToolCall) and call.name in self._tools:
            return {"role": "tool", "name": call.name, "content": text}
        return {"role": "tool", "content": text}


class SkyRlEnvironment:
    """`prompt`: the column with the prompt. `turns`: most turns, in the extras as `max_turns`."""

    def __init__(self, kind: type, path: str, prompt: str, turns: int) -> None:
        self._kind, self._path, self._prompt, self._turns = kind, path, prompt, turns
        self._own: Any = None
        self._loop = EpisodeLoop()

    def reset(self, row: Row) -> str:
        self._begin(row)
        asked = find_column(row, self._prompt)
        messages = asked if is_messages(asked) else [{"role": "user", "content": asked}]
        begun = self._loop.result(self._own.init(copy.deepcopy(messages)))
        return self._added(messages, begun)

    def snapshot(self) -> Any:
        return self._loop.result(self._own.snapshot())

    def restore(self, row: Row, snapshot: bytes) -> None:
        self._begin(row)
        self._loop.result(self._own.restore(row, snapshot))

    def _begin(self, row: Row) -> None:
        offered = {"env_config": {}, "extras": {"max_turns": self._turns, **row}}
        names = inspect.signature(self._kind).parameters
        self._own = self._kind(**{name: value for name, value in offered.items() if name in names})

    def step(self, action: str) -> Observation | Done:
        output = self._loop.result(self._own.step(action))
        if not isinstance(output, Mapping) or not {"observations", "reward", "done"} <= output.keys():
            kind = sorted(output) if isinstance(output, Mapping) else type(output).__name__
            raise ValueError(f"{self._path}: `step` returned {kind}: a dict with observations, reward, done")
        metrics = self._numbers(output.get("metadata"))
        if output["done"]:
            end: Any = getattr(self._own, "get_metrics", dict)()
            return Done(output["reward"], {**metrics, **self._numbers(end)})
        return Observation(output["observations"], output["reward"], metrics)

    def close(self) -> None:
        if self._own is not None:
            self._loop.close(self._own)

    def _added(self, messages: list[Any], begun: Any) -> str:
        """What `init` put behind the last message. Raises: ValueError: it did something else."""
        prompt: Any = begun[0] if isinstance(begun, tuple) and begun else None
        if prompt == messages:
            return ""
        if is_messages(prompt) and prompt[:-1] == messages[:-1] and len(prompt) == len(messages):
            before, now = messages[-1].get("content"), prompt[-1].get("content")
            if isinstance(before, str) and isinstance(now, str) and now.startswith(before):
                return now[len(before) :]
        raise ValueError(
            f"{self._path}: `init` returns (prompt, info), and only adds text to the last message"
        )

    def _numbers(self, values: Any) -> dict[str, float]:
        pairs = values.items() if isinstance(values, Mapping) else ()
        numbers = ((str(key), finite(value)) for key, value in pairs)
        return {key: value for key, value in numbers if value is not None}


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
