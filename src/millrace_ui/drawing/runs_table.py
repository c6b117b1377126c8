"""The list of runs as a page: a search, groups, a table to sort, and boxes that choose runs to compare."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from html import escape
from statistics import fmean, stdev
from typing import Any
from urllib.parse import quote, urlencode

from millrace.observe.live.phrases import duration
from millrace_ui.drawing.fragments import Raw, link, run_link, safe, spark, state
from millrace_ui.record.runs import COLUMNS, RunRow, RunsView, varying

SHOWN_MAX = 500
"""The most rows of a page, unless its address names more."""
COMPARED_MAX, GROUPED_MAX = 6, 40
"""The most runs that are compared: each by itself, and in groups."""
WIDTH, HEIGHT = 96, 22
GROUPS = ("state", "model", "task", "algorithm", "schedule", "tags")


def runs_page(base: str, rows: Sequence[RunRow], view: RunsView) -> str:
    """The whole list. `base` is the address of the site."""
    chosen = view.chosen(rows)
    asked = int(view.num) if view.num.isascii() and view.num.isdigit() and len(view.num) < 10 else SHOWN_MAX
    most = len(chosen) if view.group else asked  # the head of a group speaks of all its runs
    shown, left_out = chosen[:most], len(chosen) - most
    more = link(f"{base}{view.address(num=str(len(chosen)))}", "Show all")
    rest = f"<p>{left_out:,} more: {more}</p>" if left_out > 0 else ""
    return f"{_search(base, rows, chosen, view)}{_table(base, shown, view)}{rest}"


def _search(base: str, rows: Sequence[RunRow], chosen: Sequence[RunRow], view: RunsView) -> str:
    """What the address chooses, as a form."""
    kept = "".join(
        f'<input type="hidden" name="{name}" value="{escape(value)}">'
        for name, value in (("sort", view.sort), ("reverse", view.reverse), ("num", view.num))
        if value
    )
    names = [*GROUPS, *(key for key in varying(rows) if key not in GROUPS)]
    if view.group and view.group not in names:
        names.append(view.group)
    options = "".join(
        f'<option value="{escape(name)}"{" selected" * (name == view.group)}>{safe(name)}</option>'
        for name in names
    )
    count = f"{len(chosen):,} of {len(rows):,} runs." if view.find else f"{len(rows):,} runs."
    clear = f" {link(base + view.address(find='', group=''), 'Clear')}" if view.find or view.group else ""
    return (
        f'<form class="choices" role="search" action="{escape(base)}">{kept}'
        f'<label>Find <input type="search" name="find" value="{escape(view.find)}" size="28" accesskey="f" '
        f'placeholder="words, seed=3, -stopped" autocomplete="off"></label> '
        f'<label>Group by <select name="group"><option value="">nothing</option>{options}</select></label> '
        f'<button>Show</button> <span class="quiet">{count}{clear}</span></form>'
    )


def _table(base: str, rows: Sequence[RunRow], view: RunsView) -> str:
    if not rows:
        return '<p class="notice">No run has all of these words.</p>'
    body = "".join(
        _group(base, view, value, members) + "".join(_row(base, row) for row in members)
        for value, members in view.groups(rows)
    )
    links = {name: link(f"{base}{view.sorted_by(name)}", name) for name in COLUMNS}
    kept = f'<input type="hidden" name="group" value="{escape(view.group)}">' if view.group else ""
    ticks = f"Tick up to {COMPARED_MAX} runs, or up to {GROUPED_MAX} to compare groups of them."
    heads = "".join(f"<th{_order(view, name)}>{html}</th>" for name, html in links.items())
    return (
        f'<form class="runs" action="{escape(base)}compare"><p><button>Compare the chosen ones</button> '
        f'<span class="quiet" data-chosen>{ticks}</span> {_groups(base, rows, view)}</p>{kept}'
        f'<div class="wide"><table><thead><tr><th><span class="hidden">compare</span></th>'
        f"{heads}</tr></thead><tbody>{body}</tbody></table></div></form>"
    )


def _groups(base: str, rows: Sequence[RunRow], view: RunsView) -> str:
    """A link that compares the groups of a list, unless they have too many runs."""
    if not view.group or len(rows) > GROUPED_MAX:
        return ""
    names = [("run", row.name) for row in rows if not row.trouble]
    return link(f"{base}compare?{urlencode([*names, ('group', view.group)])}", "Compare the groups")


def _order(view: RunsView, name: str) -> str:
    if view.sort != name:
        return ""
    return f' aria-sort="{"descending" if view.is_descending else "ascending"}"'


def _group(base: str, view: RunsView, value: str, rows: Sequence[RunRow]) -> str:
    """The heading of a group: how many runs, and their rewards."""
    if not view.group:
        return ""
    rewards = [row.reward for row in rows if row.reward is not None]
    spread = f" ± {stdev(rewards):.3g}" if len(rewards) > 1 else ""
    figures = f", last reward {fmean(rewards):.3g}{spread}" if rewards else ""
    count = f"{len(rows)} run{'s' * (len(rows) > 1)}{figures}"
    compare = urlencode([("run", row.name) for row in rows if not row.trouble])
    several = 1 < len(rows) <= COMPARED_MAX
    links = f" {link(f'{base}compare?{compare}', 'Compare')}" if several else ""
    title = f"{safe(view.group)} = <b>{safe(value or '–')}</b>"
    return (
        f'<tr class="group"><th colspan="{len(COLUMNS) + 1}" scope="rowgroup">'
        f'<span>{title} <span class="quiet">{count}</span>{links}</span></th></tr>'
    )


def _row(base: str, row: RunRow) -> str:
    name = escape(row.name)
    box = f'<input type="checkbox" name="run" value="{name}" aria-label="compare {name}">'
    if row.trouble:
        cells = f'<td colspan="{len(COLUMNS) - 1}">{state(row.state)} {safe(row.trouble)}</td>'
        return f"<tr><td></td><td>{run_link(base, row.name)}</td>{cells}</tr>"
    curve = spark(row.rewards, WIDTH, HEIGHT) if len(row.rewards) > 1 else ""
    reward = "–" if row.reward is None else f"{row.reward:.3g}"
    shown = {
        "run": run_link(base, row.name),
        "started": Raw(_date(row.started_s)),
        "duration": "–" if row.took_s is None else duration(max(0.0, row.took_s)),
        "state": Raw(state(row.state)),
        "step": f"{row.version:,} of {row.steps:,}",
        "reward": Raw(f'<span class="reward">{reward} {curve}</span>'),
        "tags": Raw(" ".join(_tag(base, tag) for tag in row.tags)),
    }
    cells = "".join(_cell(name, shown.get(name, value(row))) for name, value in COLUMNS.items())
    return f"<tr><td>{box}</td>{cells}</tr>"


def _tag(base: str, tag: str) -> str:
    """A link to the runs with this tag."""
    return f'<a class="tag" href="{escape(base)}?find={quote(f"tags={tag}")}">{safe(tag)}</a>'


def _cell(name: str, value: Any) -> str:
    html = value if isinstance(value, Raw) else safe(str(value))
    return f"<td{' class=short' * (name not in ('run', 'tags', 'model', 'task'))}>{html}</td>"


def _date(wall_s: float | None) -> str:
    return "–" if wall_s is None else datetime.fromtimestamp(wall_s).isoformat(" ", "minutes")
