"""Rewards: a number for a completion. A reward is called with (completion, answer, columns)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Protocol

from millrace.config.tables import task as table
from millrace.core.errors import ConfigError, DataError
from millrace.environments.code import CodeReward
from millrace.environments.extract import ExpectedAnswer, Extract
from millrace.environments.function import FunctionReward
from millrace.environments.gym.gym_reward import GymReward
from millrace.environments.gym.gym_task import GymTask
from millrace.environments.rows import Row
from millrace.environments.tasks import Task, first_usable
from millrace.environments.verifiers.judge import JudgeReward
from millrace.environments.verifiers.pattern import PatternReward


class Reward(Protocol):
    """`name` and `file` locate it in failures. `scores.to_score` judges the result of a call.

    `needs_thread`: a plain call may wait, or compute long without the interpreter.
    """

    name: str
    file: str | None
    is_async: bool
    needs_thread: bool

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
            return MathReward(config.extract_answer)
        case table.ExactRewardSection():
            return ExactReward(config.extract, config.extract_answer)
        case table.CodeRewardSection():
            return CodeReward(config)
        case table.JsonRewardSection():
            from millrace.environments.verifiers.json_form import JsonReward  # loads a library of its own

            return JsonReward(config)
        case table.PatternRewardSection():
            return PatternReward(config)
        case table.JudgeRewardSection():
            return JudgeReward(config, task.prompt, run_dir=run_dir, workers=workers)
        case table.FunctionRewardSection():
            return FunctionReward(config.path, first_usable(task), config.signature, task.prompt)
        case table.EnvironmentRewardSection():
            raise ConfigError('`reward.kind` "environment" is no member of a sum, and scores no lone text')


class ExactReward:
    """1 if the extracted answer equals the reference as text, without surrounding space; else 0.

    The reward needs no thread: a regular expression blocks the interpreter, and no other thread could run.
    """

    name, is_async, needs_thread = "exact match", False, False
    file: str | None = None

    def __init__(self, extract: str | None, extract_answer: str | None = None) -> None:
        self._extract, self._reference = Extract(extract), ExpectedAnswer(self.name, extract_answer)

    def __call__(self, completion: str, answer: Any, columns: Row) -> float:
        return float(self._extract(completion) == self._reference(answer))


class MathReward:
    """1 if math-verify finds the completion's last expression equal to the reference; else 0.

    The time limits of math-verify are off, because they use SIGALRM, which works in no thread. Some answers
    (towers of powers) never end; then the caller's deadline kills this process.
    """

    name, is_async, needs_thread = "math-verify", False, True
    file: str | None = None

    def __init__(self, extract_answer: str | None = None) -> None:
        import math_verify  # before the process's memory is limited, and before the first deadline

        self._parse, self._verify = math_verify.parse, math_verify.verify
        self._reference = ExpectedAnswer(self.name, extract_answer)
        # math-verify would warn, once per process, that its limits are off.
        logging.getLogger("math_verify").setLevel(logging.ERROR)

    def __call__(self, completion: str, answer: Any, columns: Row) -> float:
        reference = self._reference(answer)
        marked = "$" in reference or "\\boxed" in reference
        gold = self._parse(reference if marked else f"\\boxed{{{reference}}}", parsing_timeout=None)
        if not gold:
            raise DataError(
                f"the reference answer {reference!r} is not mathematics that math-verify can read"
            )
        expressions = self._parse(completion, parsing_timeout=None)
        return float(self._verify(gold, expressions, timeout_seconds=None, raise_on_error=True))
