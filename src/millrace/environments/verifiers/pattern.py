"""The reward of a regular expression that matches the whole completion."""

from __future__ import annotations

import re
from typing import Any

from millrace.config.tables.verifiers import PatternRewardSection
from millrace.core.errors import ConfigError, DataError
from millrace.environments.rows import Row, find_column


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
