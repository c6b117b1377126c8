"""The scorer of a reasoning-gym family as a reward."""

from __future__ import annotations

import copy
from typing import Any

from millrace.config.tables.task import GymRewardSection
from millrace.environments.extract import Extract
from millrace.environments.gym.gym_task import GymTask, isolated
from millrace.environments.rows import Row

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
