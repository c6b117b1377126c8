"""Environments of SkyRL-Gym: `init(prompt)` and `step(action)`.

Source: skyrl-gym 0.4.0, `skyrl_gym/envs/base_text_env.py`. Here `env_config` is empty, and
`postprocessed_action` changes nothing: tokens that were sampled stay.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

from millrace.episodes.environment import Done, Observation
from millrace.episodes.own_form import EpisodeLoop
from millrace.rewards.scores import finite
from millrace.tasks.chat import is_messages
from millrace.tasks.rows import Row, find_column


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
