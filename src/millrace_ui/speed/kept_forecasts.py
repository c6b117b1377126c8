"""What a change of a run would give, kept for a while: it takes seconds, and a page may be loaded again."""

from __future__ import annotations

import time
from pathlib import Path

from millrace.run_directory.run_directory import RunDirectory
from millrace_ui.speed.speed_answer import SpeedAnswer, speed_of

KEPT_S = 60.0
KEPT_MAX = 8
"""Answers that are kept, the newest."""

_Key = tuple[Path, int]
"""A run's directory, and when its configuration was written."""


class KeptForecasts:
    """An answer is kept for `KEPT_S` after it was computed, also one that says why there is none."""

    def __init__(self) -> None:
        self._kept: dict[_Key, tuple[float, SpeedAnswer]] = {}

    def of(self, run: RunDirectory) -> SpeedAnswer:
        """Raises: as `speed_of`."""
        key = run.path, run.config.stat().st_mtime_ns
        until_s, answer = self._kept.get(key, (0.0, None))
        if answer is None or time.monotonic() > until_s:
            answer = speed_of(run, with_outlook=True, on_page=True)
            self._kept.pop(key, None)
            self._kept[key] = time.monotonic() + KEPT_S, answer
            while len(self._kept) > KEPT_MAX:
                del self._kept[next(iter(self._kept))]
        return answer
