"""The answer in a text, and the expected answer of a row."""

from __future__ import annotations

import re
from typing import Any

from millrace.core.errors import ConfigError, DataError


class Extract:
    """The answer in a text: the one group of the last match of a pattern, or all of the text."""

    def __init__(self, pattern: str | None, key: str = "reward.extract") -> None:
        try:
            self._pattern = None if pattern is None else re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"`{key}` ({pattern!r}) is not a regular expression: {error}") from error
        if self._pattern is not None and self._pattern.groups != 1:
            raise ConfigError(f"`{key}` ({pattern!r}) has {self._pattern.groups} groups, it needs one")

    def __call__(self, text: str) -> str | None:
        """The extracted text without surrounding space; None if the pattern does not match."""
        if self._pattern is None:
            return text.strip()
        matches = self._pattern.findall(text)
        return matches[-1].strip() if matches else None


class ExpectedAnswer:
    """The expected answer of a row: its answer column, or the part of it that a pattern matches."""

    def __init__(self, reward: str, pattern: str | None) -> None:
        self._reward, self._pattern = reward, pattern
        self._extract = Extract(pattern, "reward.extract_answer")

    def __call__(self, answer: Any) -> str:
        """The expected answer without surrounding space. Raises: DataError: there is none."""
        if answer is None:
            raise DataError(
                f"{self._reward} needs a reference answer, the row has none: set `task.answer` to its column"
            )
        expected = self._extract(str(answer))
        if expected is None:
            raise DataError(
                f"the answer {str(answer)[-80:]!r} has nothing that `reward.extract_answer` "
                f"({self._pattern!r}) finds"
            )
        return expected
