"""The parts of a run's stream of prompts: each with its task and its reward. Most runs have one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec.structs import replace

from millrace.config.schema import Config
from millrace.config.tables.task import BLOCK, MixtureTaskSection
from millrace.core.errors import ConfigError, DataError, RewardError, SandboxError
from millrace.core.rounding import reaches
from millrace.core.types import Score, Scored
from millrace.tasks.order import permuted, row_of
from millrace.tasks.tasks import Task, make_task

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """`name` is empty in a run without a mixture."""

    name: str
    config: Config
    task: Task

    def row_id(self, row: int) -> str:
        """The name of the row in the ledger and in reports. It begins with the name of the part."""
        return f"{self.name}/{self.task.row_id(row)}" if self.name else self.task.row_id(row)


class Parts:
    """The part and the row of each group, a pure function of its id.

    In each block of `BLOCK` groups a part has its quota, in a seeded order. A part draws each of its rows
    once per epoch of its own, in a seeded order.

    Raises: ConfigError, DataError: a task cannot be made; of a mixture, the error names the part.
    """

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self._seed, self._task, each = config.seed, config.task, config.by_part
        tasks = made(each, lambda one: make_task(one.one_task, tokenizer))
        self.all = [Part(name, one, tasks[name]) for name, one in each.items()]
        self.rows = sum(part.task.rows for part in self.all)

    def wrap(self, kind: Callable[[Task], Task]) -> None:
        """Take `kind(task)` for the task of each part."""
        self.all = [dataclasses.replace(part, task=kind(part.task)) for part in self.all]

    def locate(self, group_id: int) -> tuple[Part, int]:
        """The part of a group, and its row there."""
        if not isinstance(self._task, MixtureTaskSection):
            return self.all[0], row_of(group_id, self.rows, self._seed)
        index, position = place(group_id, self._task.quotas, self._seed)
        part = self.all[index]
        return part, row_of(position, part.task.rows, f"{self._seed}/{part.name}")

    def measured(self, part: Part, score: Score) -> Score:
        """The score with the metrics of a mixture: NAME/reward and NAME/pass_rate of its part, and NAME/share
        of each part. Their means over trajectories are what they say."""
        if not isinstance(self._task, MixtureTaskSection) or not isinstance(score, Scored):
            return score
        metrics = {f"{one.name}/share": float(one is part) for one in self.all}
        metrics[f"{part.name}/reward"] = score.value
        metrics[f"{part.name}/pass_rate"] = float(reaches(score.value, self._task.correct_at))
        return replace(score, metrics=score.metrics | metrics)


def place(group_id: int, quotas: tuple[int, ...], seed: int) -> tuple[int, int]:
    """The part of a group, and how many groups of the stream before it, or of its block, have that part.

    A seeded permutation of a block deals its places to the parts, and orders the places of each part.
    """
    block, position = divmod(group_id, BLOCK)
    rank = permuted(position, BLOCK, f"{seed}/mixture/{block}")
    for index, quota in enumerate(quotas):
        if rank < quota:
            return index, block * quota + rank
        rank -= quota
    raise AssertionError((group_id, quotas))


def made(each: Mapping[str, S], make: Callable[[S], T]) -> dict[str, T]:
    """What `make` makes for each part. Raises: the errors of `make`, which then name the part."""
    results = {}
    for name, one in each.items():
        try:
            results[name] = make(one)
        except (ConfigError, DataError, RewardError, SandboxError) as error:
            if not name:
                raise
            raise type(error)(f"`task.parts` ({name}): {error}") from error
    return results
