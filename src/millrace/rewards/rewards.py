"""Rewards: a number for a completion. A reward is called with (completion, answer, columns)."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, Protocol, cast

from millrace.config.tables import task as table
from millrace.config.tables.reward_kinds import PatternRewardSection
from millrace.config.tables.task import GymRewardSection
from millrace.core.errors import ConfigError, DataError
from millrace.core.extras import refuse_missing
from millrace.core.wings import wing
from millrace.rewards.exact_reward import ExactReward
from millrace.rewards.function import FunctionReward
from millrace.rewards.judge import JudgeReward
from millrace.rewards.mathematics.math_reward import MathReward
from millrace.rewards.references import Extract
from millrace.tasks.gym_task import GymTask, isolated
from millrace.tasks.rows import Row, find_column
from millrace.tasks.tasks import Task, first_usable


class Reward(Protocol):
    """`name` and `file` locate it in failures. `scores.to_score` judges the result of a call."""

    name: str
    file: str | None
    is_async: bool

    def __call__(self, completion: str, answer: Any, columns: Row) -> Any: ...


def make_reward(
    config: table.OneReward, task: Task, *, run_dir: Path | None = None, workers: int = 1
) -> Reward:
    """The reward of a configuration, for the rows of a task. A judge keeps its judgements in `run_dir`, and
    shares its limits with the `workers` of the run.

    Raises:
        ConfigError: the reward does not fit the task. RewardError: the user's function cannot be loaded.
        SandboxError: this machine has no sandbox of the level that is asked for.
    """
    match config:
        case table.GymRewardSection():
            if not isinstance(task, GymTask):
                raise ConfigError('`reward.kind` "gym" needs `task.kind` "gym"')
            return GymReward(config, task)
        case table.MathRewardSection():
            return MathReward(config.extract_answer, config.answer_is)
        case table.ExactRewardSection():
            return ExactReward(config.extract, config.extract_answer, config.answer_is, config.compare)
        case table.CodeRewardSection():
            return cast("Reward", wing("sandbox.reward")(config, task.prompt))
        case table.JsonRewardSection():
            refuse_missing("jsonschema", '`reward.kind` ("json")')
            from millrace.rewards.json_form import JsonReward  # loads a library of its own

            return JsonReward(config)
        case table.PatternRewardSection():
            return PatternReward(config)
        case table.JudgeRewardSection():
            return JudgeReward(config, task.prompt, run_dir=run_dir, workers=workers)
        case table.FunctionRewardSection():
            return FunctionReward(config.path, first_usable(task), config.signature, task.prompt)
        case table.EnvironmentRewardSection():
            raise ConfigError('`reward.kind` "environment" is no member of a sum, and scores no lone text')


PLAIN_TEXT = "lorem ipsum"
NEVER_OF_THE_TEXT = ImportError, OSError, MemoryError
"""What a scorer raises for want of something that no text gives."""


class GymReward:
    """The scorer of the reasoning-gym data set; values below the threshold are 0.

    The threshold is needed because many scorers give a little for any answer. A text on which the scorer
    raises earns 0, if the same scorer can score the row: its reference, or a plain text where it has none.
    """

    file: str | None = None
    is_async = False

    def __init__(self, config: GymRewardSection, task: GymTask) -> None:
        self.name = f"the scorer of {type(task.dataset).__name__}"
        self._scorer, self._threshold = task.dataset.score_answer, config.threshold
        self._extract = Extract(config.extract)

    def __call__(self, completion: str, answer: Any, columns: Row) -> float:
        extracted = self._extract(completion)
        if extracted is None:
            return 0.0
        try:
            value = self._score(extracted, columns)
        except NEVER_OF_THE_TEXT:
            raise
        except Exception:
            if not self._can_score(columns):
                raise
            return 0.0
        return value if value >= self._threshold else 0.0

    def _score(self, text: str, columns: Row) -> Any:
        with isolated(text):
            return self._scorer(answer=text, entry=copy.deepcopy(columns))

    def _can_score(self, columns: Row) -> bool:
        reference = columns.get("answer")
        try:
            value = self._score(PLAIN_TEXT if reference is None else str(reference), columns)
        except Exception:
            return False
        return reference is None or value >= self._threshold


class PatternReward:
    """1 if the pattern matches the whole completion, without surrounding space; else 0.

    It runs on the loop. If it backtracks without end, the caller's deadline kills this process, and the
    reward has failed.

    Raises: ConfigError: the pattern of the configuration is none.
    """

    name, is_async = "regular expression", False
    file: str | None = None

    def __init__(self, config: PatternRewardSection) -> None:
        self._column = config.pattern_column
        try:
            self._pattern = None if config.pattern is None else re.compile(config.pattern)
        except re.error as error:
            raise ConfigError(
                f"`reward.pattern` ({config.pattern!r}) is not a regular expression: {error}"
            ) from error

    def __call__(self, completion: str, answer: Any, columns: Row) -> float:
        pattern = self._pattern or self._of_row(columns)
        return float(pattern.fullmatch(completion.strip()) is not None)

    def _of_row(self, columns: Row) -> re.Pattern[str]:
        """Raises: DataError: the row has no pattern, or one that is none."""
        text = find_column(columns, self._column or "")
        if not isinstance(text, str):
            raise DataError(
                f"the row has no pattern: `reward.pattern_column` names the column {self._column!r}"
            )
        try:
            return re.compile(text)
        except re.error as error:
            raise DataError(f"the row's pattern {text!r} is not a regular expression: {error}") from error
