"""The answer in a text, by a pattern."""

from __future__ import annotations

import re

from millrace.core.errors import ConfigError


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
