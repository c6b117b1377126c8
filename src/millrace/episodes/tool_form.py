"""Environments of tools: `reset(**row)`, and public methods that the model calls.

Source: TRL 1.16, `GRPOTrainer(environment_factory=...)`. A turn without a call ends the episode.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from typing import Any

import msgspec

from millrace.config.tables.task import EnvironmentRewardSection
from millrace.conversations.call_reader import CallReader
from millrace.conversations.tool_calls import Malformed, ToolCall
from millrace.episodes.budgets import TOOL_CALLS
from millrace.episodes.environment import Done, Message, Observation, OverBudget
from millrace.episodes.own_form import EpisodeLoop
from millrace.episodes.tools import Tool, ToolError, WrongCall, to_result
from millrace.rewards.scores import finite, shortened
from millrace.tasks.rows import Row


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
