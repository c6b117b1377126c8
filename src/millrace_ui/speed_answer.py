"""Where a run is slow, and what a change would give: to print, as JSON, and as HTML with a stacked bar for
each role.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

from millrace.core.errors import DataError, MillraceError
from millrace.diagnose import newest_steps, time_use
from millrace.diagnose.bottleneck import LONG_TAIL, Bottleneck
from millrace.diagnose.time_use import TimeUse
from millrace.observe.sinks.log_files import parts
from millrace.observe.terminal import as_text
from millrace.run_directory.run_directory import RunDirectory
from millrace_sim.calibrate.changes import BOUND, REWARDS, Outlook, outlook
from millrace_sim.calibrate.learn import calibrate
from millrace_ui.drawing import fragments
from millrace_ui.drawing.bars import WEIGHTS, WORK, time_bars

OUTLOOK_S, PAGE_S = 40.0, 10.0
"""After so long, with all that is read for it, nothing more is simulated. A page gives up after 20 s."""
OUTLOOK_BYTES = 24 << 20
"""The events that a page reads for an outlook."""
SAME = 0.05
"""A gain or loss of less is within the noise of a short simulation."""


@dataclass(frozen=True)
class SpeedAnswer:
    """`outlook` is what changes would give. None: nobody asked, or `why` it is not known."""

    run: str
    use: TimeUse
    bottleneck: Bottleneck
    outlook: Outlook | None = None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """The answer as JSON types."""
        return asdict(self)

    def __str__(self) -> str:
        return as_text(self, 100, soft_wrap=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text | Table]:
        yield Text(headline(self.use))
        for role, seconds in self.use.roles.items():
            yield Text(f"{role:14} {shares_of(seconds)}")
        yield Text(f"\nbottleneck     {self.bottleneck}", "bold")
        if self.why:
            yield Text(f"\nWhat a change would give cannot be said: {self.why}")
        if self.outlook is not None:
            yield from self._changes(self.outlook)

    def _changes(self, outlook: Outlook) -> Iterator[Text | Table]:
        yield Text(f"\n{fidelity(outlook)}")
        if outlook.gains:
            table = Table("change", "speed", box=None, pad_edge=False)
            table.columns[1].justify = "right"
            for change, gain in gains_of(outlook):
                table.add_row(change, gain)
            yield table
        yield from (Text(f"note: {note}") for note in outlook.notes)


def speed_of(run: RunDirectory, *, with_outlook: bool = False, on_page: bool = False) -> SpeedAnswer:
    """What only the outlook lacks is `why`, and no error. A page takes less time for it.

    Raises: DataError, ConfigError: a record is missing or damaged.
    """
    until_s = time.monotonic() + (PAGE_S if on_page else OUTLOOK_S)

    def check() -> None:
        if time.monotonic() > until_s:
            raise DataError("no time was left to learn its costs. `millrace plan RUN` takes longer")

    bytes_max = newest_steps.PAGE_BYTES if on_page else None
    use, slow = newest_steps.newest_use(run.events, run.read_config(), bytes_max=bytes_max)
    answer = SpeedAnswer(str(run.path), use, slow)
    if not with_outlook:
        return answer
    if (size := sum(part.stat().st_size for part in parts(run.events))) > OUTLOOK_BYTES and on_page:
        why = f"{size:,} bytes of events are too many for a page. `millrace plan RUN` reads them"
        return replace(answer, why=why)
    try:
        costs = calibrate(run.path, check)
        predicted = outlook(costs, lambda: time.monotonic() > until_s, first=helped(slow.name))
    except MillraceError as error:
        return replace(answer, why=str(error))
    return replace(answer, outlook=predicted)


def helped(bottleneck: str) -> str:
    """The role whose changes help: one of `sim.calibrate.changes`, or another name if no change helps."""
    return _HELPED.get(bottleneck) or bottleneck.partition(",")[0]


_HELPED = {"environment": REWARDS, LONG_TAIL: BOUND}


# ---------------------------------------------------------------- text


def headline(use: TimeUse) -> str:
    if use.steps_per_s is None:
        return "No two steps were read."
    return f"The last {use.steps} steps took {use.took_s:,.1f} s: {speed(use.steps_per_s)}."


def shares_of(seconds: dict[str, float]) -> str:
    """Largest first, without what is less than half a percent."""
    total = sum(seconds.values()) or 1.0
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{cause} {spent / total:.0%}" for cause, spent in ordered if spent >= 0.005 * total)


def fidelity(outlook: Outlook) -> str:
    measured = f"Measured {speed(outlook.measured_per_s)}"
    if outlook.simulated_per_s is None or outlook.error is None:
        return f"{measured}; what a change would give cannot be said."
    return (
        f"{measured}; simulated with the run's own costs {speed(outlook.simulated_per_s)} "
        f"({outlook.error:+.0%})."
    )


def speed(per_s: float) -> str:
    return f"{per_s:,.3g} versions/s" if per_s >= 0.1 else f"{3600 * per_s:,.3g} versions/h"


def gains_of(outlook: Outlook) -> Iterator[tuple[str, str]]:
    """Each change, and the factor of the speed in words."""
    for gain in outlook.gains:
        if gain.ratio is None:
            yield gain.change, f"unknown: {gain.why}"
        else:
            yield gain.change, f"x {gain.ratio:.2f}" + " (no difference)" * (abs(gain.ratio - 1) < SAME)


# ---------------------------------------------------------------- as HTML


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
