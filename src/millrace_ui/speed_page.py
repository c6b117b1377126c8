"""Where a run is slow, as HTML: a stacked bar for each role, the bottleneck, and what a change would give."""

from __future__ import annotations

import time
from pathlib import Path

from millrace.diagnose import time_use
from millrace.run_directory.run_directory import RunDirectory
from millrace_ui.drawing import fragments
from millrace_ui.drawing.bars import WEIGHTS, WORK, time_bars
from millrace_ui.speed_answer import SpeedAnswer, fidelity, gains_of, headline, speed_of

COLORS = {
    time_use.COMPUTING: WORK,
    time_use.DECODING: WORK,
    time_use.SCORING: WORK,
    time_use.PUBLISHING: WEIGHTS,
    time_use.CHECKPOINT: WEIGHTS,
    time_use.WEIGHTS: WEIGHTS,
}
"""Of causes. All others are waiting."""


def speed_section(answer: SpeedAnswer, address: str = "") -> str:
    """`address` of the page with what a change would give, if that is not computed yet; empty: no link."""
    slow = answer.bottleneck
    advice = f"<p>{fragments.quoted(slow.advice)}.</p>" if slow.advice else ""
    return (
        f"<h2>Where the run is slow</h2><p>{fragments.safe(headline(answer.use))}</p>"
        f"<article><h3>Bottleneck: {fragments.safe(slow.name)}</h3>"
        f"<p>{fragments.safe(slow.reason[:1].upper() + slow.reason[1:])}.</p>{advice}</article>"
        f'<p class="quiet">{_LEGEND}</p>{time_bars(answer.use.roles, COLORS)}{_outlook(answer, address)}'
    )


def _outlook(answer: SpeedAnswer, address: str) -> str:
    title = "<h2>What a change would give</h2>"
    if answer.why:
        return title + f'<p class="notice">It cannot be said: {fragments.quoted(answer.why)}</p>'
    if answer.outlook is None:
        link = fragments.link(address, "Simulate this run with one change after the other")
        return f"{title}<p>{link}: it takes some seconds.</p>" if address else ""
    rows = [
        (fragments.Raw(fragments.quoted(change)), fragments.Raw(fragments.safe(gain)))
        for change, gain in gains_of(answer.outlook)
    ]
    notes = "".join(f'<p class="quiet">{fragments.quoted(note)}.</p>' for note in answer.outlook.notes)
    table = fragments.table(("change", "speed"), rows) if rows else ""
    return f"{title}<p>{fragments.safe(fidelity(answer.outlook))}</p>{table}{notes}"


_LEGEND = (
    "Green is work, magenta is weights on their way, grey is waiting; shades tell causes apart. Of replicas "
    "and reward workers, seconds are counted for each of them."
)


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
