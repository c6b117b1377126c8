"""Several runs or groups of runs over one axis, their figures, the keys that differ, and the form that
chooses curves. A browser puts what the form has into the address.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from statistics import fmean, stdev
from urllib.parse import quote

from millrace_ui.curves.cards import cards, legend, notes
from millrace_ui.curves.choices import SMOOTH_MAX, Band
from millrace_ui.curves.curve_lines import CurveSet
from millrace_ui.drawing import fragments
from millrace_ui.drawing.charts import ASYNCHRONY
from millrace_ui.drawing.fragments import link, safe
from millrace_ui.drawing.runs_table import COMPARED_MAX, GROUPED_MAX, GROUPS
from millrace_ui.overview import AXES, Overview
from millrace_ui.record.runs import COLUMNS, RunRow, RunsView, varying, written
from millrace_ui.record.steps import newest_figures
from millrace_ui.side_by_side import figures_of


def comparison_page(
    base: str, groups: RunGroups, curves: CurveSet, runs: Sequence[Overview], rows: Sequence[RunRow]
) -> str:
    """`rows`: of all runs that the address names. `runs`: those that are drawn."""
    one = replace(curves.choices, runs=(), group="")
    addresses = (
        [] if groups.grouped else [f"{base}curves/{quote(name)}{one.address()}" for name in groups.names]
    )
    keys = [*GROUPS, *(key for key in varying(rows) if key not in GROUPS)]
    return (
        f"<h1>Runs compared</h1>{_left_out(groups, curves.choices.group)}"
        f"{curve_form(f'{base}compare', curves, keys)}{notes(curves)}{legend(curves, addresses)}"
        f"{cards(curves, base)}<h2>Figures</h2>{_groups(groups, runs) if groups.grouped else _figures(runs)}"
        f"<h2>Configuration</h2>{configurations(groups.members)}"
    )


def _left_out(groups: RunGroups, group: str) -> str:
    """Which choices could not be met."""
    unknown_key = fragments.notice(f"No run has the key {group}.") if group and not groups.grouped else ""
    if not groups.left_out:
        return unknown_key
    several = "" if groups.grouped else " Group them by a key to compare more."
    return unknown_key + fragments.notice(
        f"The first {groups.most} are compared. Left out: {', '.join(groups.left_out)}.{several}"
    )


def _figures(runs: Sequence[Overview]) -> str:
    names = [run.name for run in runs]
    rows = [(figure.name, *figure.values) for figure in figures_of(runs)]
    table = fragments.table(("", *names), rows)
    return f"{''.join(map(_unread, runs))}{table}{fragments.terms(ASYNCHRONY)}"


def _groups(groups: RunGroups, runs: Sequence[Overview]) -> str:
    """How many runs a group has, which, their last rewards and the newest figures of their evaluations."""
    evaluated = {run.name: newest_figures(run.run, run.config) for run in runs}
    names = list(dict.fromkeys(name for one in evaluated.values() for name in one))
    lines = []
    for label, rows in groups.members.items():
        figures = [[evaluated[row.name].get(name) for row in rows] for name in names]
        cells = [_mean(values) for values in ([row.reward for row in rows], *figures)]
        lines.append((label, len(rows), *cells, ", ".join(row.name for row in rows)))
    explanation = '<p class="quiet">Each figure is a mean, ± the standard deviation.</p>'
    return explanation + fragments.table(("group", "number", "last reward", *names, "runs"), lines)


def _mean(values: Sequence[float | None]) -> str | None:
    known = [value for value in values if value is not None]
    spread = f" ± {stdev(known):.3g}" if len(known) > 1 else ""
    return f"{fmean(known):.3g}{spread}" if known else None


def _unread(run: Overview) -> str:
    """A notice if not all events of the run are read."""
    if run.is_whole:
        return ""
    read = f"{run.name}: {run.story.share_read:.0%} of the events are read. Its figures are of those events."
    return fragments.notice(f"{read} The page loads itself again.")


GROUPS_MAX = 12
VALUES_MAX = 4
"""The most different values of a group that a cell names."""


@dataclass(frozen=True, slots=True)
class RunGroups:
    """Runs by the label of their line. `left_out`: runs for which there is no room."""

    members: Mapping[str, Sequence[RunRow]]
    grouped: bool
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, rows: Sequence[RunRow], group: str) -> RunGroups:
        """By a column or key that any run has. Else each run is alone."""
        if not any(group in row.keys or group in COLUMNS for row in rows):
            alone = {row.name: [row] for row in rows[:COMPARED_MAX]}
            return cls(alone, False, tuple(row.name for row in rows[COMPARED_MAX:]))
        groups = RunsView(group=group).groups(rows[:GROUPED_MAX])
        rest = [row for _, members in groups[GROUPS_MAX:] for row in members] + list(rows[GROUPED_MAX:])
        members = {f"{group} = {value or '–'}": several for value, several in groups[:GROUPS_MAX]}
        return cls(members, True, tuple(row.name for row in rest))

    @property
    def names(self) -> list[str]:
        return [row.name for rows in self.members.values() for row in rows]

    @property
    def most(self) -> str:
        """What there is room for."""
        return f"{GROUPED_MAX} runs and {GROUPS_MAX} groups" if self.grouped else f"{COMPARED_MAX} runs"


def configurations(members: Mapping[str, Sequence[RunRow]]) -> str:
    """One table: a row for each key that differs, a column for each run or group."""
    every = [row for rows in members.values() for row in rows]
    lines = [(key, *(_values(key, rows) for rows in members.values())) for key in varying(every)]
    return fragments.table(("key", *members), lines, empty="Their configurations are equal.")


def _values(key: str, rows: Sequence[RunRow]) -> str:
    values = list(dict.fromkeys(written(row.keys[key]) if key in row.keys else "not there" for row in rows))
    more = f", and {len(values) - VALUES_MAX} more" if len(values) > VALUES_MAX else ""
    return ", ".join(values[:VALUES_MAX]) + more


# ---------------------------------------------------------------- the form


BANDS = {Band.RANGE: "least to largest", Band.DEVIATION: "standard deviation"}


def curve_form(address: str, curves: CurveSet, groups: Sequence[str] | None = None) -> str:
    """`groups`: the keys by which runs can be grouped; None: the address has the name of the one run."""
    one = curves.choices
    runs = "".join(f'<input type="hidden" name="run" value="{escape(name)}">' for name in one.runs)
    fields = [
        _select("by", "Axis", [(by.value, label) for by, label in AXES.items()], one.by.value),
        f'<label title="0: none. 0.9: about the last ten steps">Smoothing '
        f"{_number('smooth', f'{one.smooth:g}' if one.smooth else '', 'any', f'{SMOOTH_MAX}')}</label>",
        f"<label>Steps from {_number('from', one.first)}</label><label>to {_number('to', one.last)}</label>",
        f'<label><input type="checkbox" name="log" value="1"{" checked" * one.log}> logarithmic</label>',
    ]
    if groups is not None:
        names = dict.fromkeys([*groups, *[one.group] * bool(one.group)])  # it may not differ among these runs
        options = [("", "nothing"), *((name, name) for name in names)]
        fields.append(_select("group", "Group by", options, one.group))
        if curves.grouped:
            fields.append(
                _select("band", "Band", [(b.value, text) for b, text in BANDS.items()], one.band.value)
            )
    return (
        f'<form class="curves" action="{escape(address)}">{runs}{_metrics(curves)}'
        f'<div class="choices">{"".join(fields)}<button>Draw</button> {_ranges(address, curves)}</div></form>'
    )


def _ranges(address: str, curves: CurveSet) -> str:
    """Links to ranges of versions."""
    newest = max(
        (steps.versions[-1] for runs in curves.members.values() for steps in runs if len(steps)), default=0
    )
    ranges = {
        "all steps": None,
        "newest half": newest - max(1, newest // 2) + 1,
        "newest tenth": newest - max(1, newest // 10) + 1,
    }
    links = (
        link(address + curves.choices.address(first=first, last=None), words)
        for words, first in ranges.items()
    )
    return f'<span class="quiet">{" ".join(links)}</span>'


def _metrics(curves: CurveSet) -> str:
    """A box for each metric, by the first word of its name, in the order in which they are offered."""
    every, drawn = curves.measured, set(curves.drawn)
    sections: dict[str, list[str]] = {}
    for name in every:
        sections.setdefault(name.partition("/")[0], []).append(name)
    boxes = "".join(
        f"<fieldset><legend>{safe(title)}</legend>{''.join(_boxes(names, drawn))}</fieldset>"
        for title, names in sections.items()
    )
    return (
        f'<details class="metrics"><summary>Metrics: {len(drawn)} of {len(every)}</summary>{boxes}</details>'
    )


def _boxes(names: Iterable[str], drawn: set[str]) -> Iterable[str]:
    return (
        f'<label><input type="checkbox" name="metric" value="{escape(name)}"{" checked" * (name in drawn)}> '
        f"{safe(name.partition('/')[2] or name)}</label>"
        for name in names
    )


def _number(name: str, value: object, step: str = "1", largest: str = "") -> str:
    shown = "" if value is None else escape(str(value))
    most = f' max="{largest}"' if largest else ""
    return f'<input type="number" name="{name}" min="0"{most} step="{step}" value="{shown}">'


def _select(name: str, label: str, options: Iterable[tuple[str, str]], chosen: str) -> str:
    each = "".join(
        f'<option value="{escape(value)}"{" selected" * (value == chosen)}>{safe(words)}</option>'
        for value, words in options
    )
    return f'<label>{label} <select name="{name}">{each}</select></label>'
