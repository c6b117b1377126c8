"""What a terminal shows of a sweep: a table that renews itself, or a line for each change; at the end the
ranking."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from millrace.observe.terminal import can_redraw
from millrace_sweeps.decisions.space import short_keys, shown
from millrace_sweeps.decisions.standings import Standing, standings
from millrace_sweeps.trial_record import SweepTrial, Trials, TrialState

ROWS_MAX = 20
REASON_MAX = 160
RANKED_MAX = 50
_ORDER = ("running", "interrupted", "failed", "finished", "stopped", "waiting")


class Board:
    """A context manager. `changed` tells of one trial, `refresh` of time that passed."""

    def __init__(self, console: Console, trials: Trials, steps: dict[str, int]) -> None:
        self._console, self._trials, self._steps = console, trials, steps
        self._live: Live | None = None

    def __enter__(self) -> Board:
        console = self._console
        if can_redraw(console):
            self._live = Live(self._table(), console=console, auto_refresh=False)
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def changed(self, name: str) -> None:
        trial = self._trials.trials[name]
        if self._live is None or trial.state is TrialState.FAILED:
            self._console.print(Text(_line(name, trial, self._steps.get(name))), soft_wrap=True)
        self.refresh()

    def say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)

    def _table(self) -> RenderableType:
        trials = sorted(self._trials.trials.items(), key=lambda item: _ORDER.index(item[1].state))
        table = Table(box=None, pad_edge=False)
        for heading in ("trial", "state", "step", self._trials.metric):
            table.add_column(heading, justify="left" if heading in ("trial", "state") else "right")
        for name, trial in trials[:ROWS_MAX]:
            steps = self._steps.get(name)
            step = f"{trial.step}/{steps}" if steps else str(trial.step)
            table.add_row(Text(name), str(trial.state), step, _number(trial.value))
        return Group(table, Text(counts(self._trials), style="dim"))


def counts(trials: Trials) -> str:
    """As "12 trials: 9 finished, 1 failed, 2 waiting"."""
    count = Counter(str(trial.state) for trial in trials.trials.values())
    parts = ", ".join(f"{count[state]} {state}" for state in _ORDER if count[state])
    num = len(trials.trials)
    return f"{num} trial{'' if num == 1 else 's'}: {parts}"


def ranking(trials: Trials) -> RenderableType:
    """A row for each combination, the best first, and why trials failed."""
    ranked = standings(trials)
    keys = short_keys(dict.fromkeys(key for one in ranked for key in one.overrides))
    table = Table(box=None, pad_edge=False)
    for heading in (*keys.values(), trials.metric, "std. error", "trials", ""):
        table.add_column(heading, justify="right", overflow="fold")
    for one in ranked[:RANKED_MAX]:
        table.add_row(*_cells(one, list(keys)))
    more = len(ranked) - RANKED_MAX
    failed = [
        Text(f"failed: {name}: {first_line(trial.reason)}", style="red")
        for name, trial in trials.trials.items()
        if trial.state is TrialState.FAILED
    ]
    return Group(table, *([Text(f"... and {more} more")] if more > 0 else []), *failed)


def first_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= REASON_MAX else f"{line[:REASON_MAX]}..."


def _cells(one: Standing, keys: list[str]) -> list[Text]:
    values: list[Any] = [shown(one.overrides[key]) if key in one.overrides else "-" for key in keys]
    error = "-" if math.isnan(one.error) else f"{one.error:.2g}"
    used = one.num_finished + one.num_stopped + one.num_failed - one.num_unvalued
    parts = ((one.num_stopped, "stopped early"), (one.num_failed, "failed"))
    remark = ", ".join(f"{count} {what}" for count, what in parts if count)
    return [
        Text(str(cell))
        for cell in (*values, _number(one.value), error, f"{used} of {len(one.names)}", remark)
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _line(name: str, trial: SweepTrial, steps: int | None) -> str:
    step = f", step {trial.step}" + (f"/{steps}" if steps else "") if trial.step else ""
    value = "" if trial.value is None else f", value {trial.value:.4g}"
    return f"{name}: {trial.state}{step}{value}" + (f": {first_line(trial.reason)}" if trial.reason else "")
