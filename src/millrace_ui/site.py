"""The pages of `millrace ui`. Each page is a function from a query to HTML. No socket here."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from math import inf, isfinite
from pathlib import Path
from typing import Any
from urllib.parse import quote

from millrace.core.errors import DataError, MillraceError
from millrace.core.types import State
from millrace.ledger.samples import ANY, Choice, SampleFilter
from millrace.run_directory.run_directory import RunDirectory
from millrace_curation.output import SUMMARY
from millrace_ui import page
from millrace_ui.curated import read_page
from millrace_ui.curves.cards import CurveFile, cards, curve_file, notes
from millrace_ui.curves.chart import run_cards
from millrace_ui.curves.choices import CurveChoices
from millrace_ui.curves.comparison_page import RunGroups, comparison_page, curve_form
from millrace_ui.curves.curve_lines import CurveSet
from millrace_ui.drawing import fragments
from millrace_ui.drawing.bars import timeline_card
from millrace_ui.drawing.colours import TokenColor
from millrace_ui.drawing.fragments import filter_form, in_address
from millrace_ui.drawing.group_page import about, group_page, known_largest, row_columns
from millrace_ui.drawing.runs_table import GROUPED_MAX, runs_page
from millrace_ui.overview import AXES, FIRST_READ_S, TIMELINE, Overview
from millrace_ui.record.groups import TaskRow, TaskRows, read_group, read_member
from millrace_ui.record.runs import RunRow, RunRows, RunsView, find_runs
from millrace_ui.record.steps import Axis
from millrace_ui.record.tokens import Shown, choose, count, filtered_line, search, shown_of
from millrace_ui.speed_answer import KeptForecasts, speed_of, speed_section

KEPT_MAX = GROUPED_MAX + 8
"""The most runs that are kept between two requests: a comparison, and some pages of other runs."""
ANSWERS_MAX = 8
CHART = "chart-"
"""The start of the id of a chart on the page of a run."""
SHOWN, SHOWN_MAX = 10, 100
REFRESH_S, CATCH_UP_S = 2.0, 0.5
CURVES_READ_S = 2.0
"""A page of many runs reads new steps for about so long. The rest is for its next time."""
REST = 80.0
"""A run is read again after so many times the CPU time of its last reading. So reading takes at most 2 %
of a core."""

_VIEWS = {
    "run": "Run",
    "curves": "Curves",
    "speed": "Speed",
    "samples": "Trajectories",
    "config": "Configuration",
}

Query = Mapping[str, list[str]]


@dataclass(frozen=True, slots=True)
class PageResponse:
    """`content` is JSON for the page's script. A request before `until_s` gets the same content."""

    content: dict[str, Any]
    until_s: float


class Site:
    """Pages of the runs below `root`. `base` is the site's address, with a slash at its end.
    Not for use from several threads.

    Raises: MillraceError: from every page, if a run cannot be read.
    """

    def __init__(self, root: Path, base: str) -> None:
        self._root, self._base = root, base
        self._run_rows = RunRows()
        self._kept: dict[str, Overview] = {}
        self._answers: dict[tuple[str, Axis], PageResponse] = {}
        self._rows: dict[str, TaskRows] = {}
        self._forecasts = KeptForecasts()

    # ------------------------------------------------------------ pages

    def runs(self, query: Query) -> page.PageContent:
        """The runs that the query chooses, the newest first unless it names another order."""
        table = runs_page(self._base, self._run_rows.of(find_runs(self._root)), RunsView.of(query))
        curations = [
            fragments.link(f"{self._base}curation/{quote(name)}", name) for name in self._curations()
        ]
        more = f"<h2>Curations</h2><p>{' '.join(curations)}</p>" if curations else ""
        return page.PageContent(f"<h1>Runs in {fragments.safe(str(self._root))}</h1>{table}{more}")

    def curation(self, name: str) -> page.PageContent:
        """What `millrace curate` dropped and kept. Raises: DataError: there is no such curation."""
        directory = self._curations().get(name)
        if directory is None:
            raise DataError(f"there is no curation {name} in {self._root}")
        return read_page(directory)

    def run(self, name: str, query: Query) -> page.PageContent:
        """Curves, findings and the timeline; the page's script renews them from `data`."""
        by, run = _axis(query), self._run(name)
        run.update(FIRST_READ_S)
        zoom = f' data-zoom="{self._base}curves/{quote(name)}"' if by is Axis.STEP else ""
        parts = run.html_by_id()
        timeline = timeline_card("Timeline", TIMELINE, parts.pop("lanes"), "lanes")
        places = {key: page.place(key, html) for key, html in parts.items()}
        html = (
            f"{self._head(name, 'run', f'?by={by}')}{places['facts']}{places['notice']}{places['findings']}"
            f"{places['waiting']}{self._axes(f'run/{quote(name)}?', by)}"
            f'<div class="charts"{zoom}>{run_cards(run.charts(by), start=CHART)}'
            f'<section class="chart whole"><h2>Where the time went</h2>{places["spent"]}</section>'
            f"{timeline}</div><h2>Troubles</h2>{places['troubles']}"
        )
        return page.PageContent(html)

    def data(self, name: str, query: Query) -> dict[str, Any]:
        """The newest content of a run's page, and the seconds until the script asks again."""
        by, now_s = _axis(query), time.monotonic()
        kept = self._answers.get((name, by))
        if kept is None or now_s >= kept.until_s:
            run, began_s = self._run(name), time.thread_time()
            was_whole = run.is_whole
            run.update()
            charts = {f"{CHART}{key}": html for key, html in run.charts(by).items()}
            content = {"html": run.html_by_id() | charts}
            rest_s = max(REFRESH_S, REST * (time.thread_time() - began_s)) if was_whole else CATCH_UP_S
            kept = PageResponse(content | {"next_s": rest_s}, time.monotonic() + 0.9 * rest_s)
            others = [(key, answer) for key, answer in self._answers.items() if key != (name, by)]
            self._answers = {(name, by): kept} | dict(others[: ANSWERS_MAX - 1])
        return kept.content

    def samples(self, name: str, query: Query) -> page.PageContent:
        """A choice of trajectories, those that a filter lets through, those with a text, or the one with an
        id."""
        run, text, one = self._run(name), _one(query, "text"), _number(query, "trajectory")
        choice, only, color = _choice(query), _filter(query), _color(query)
        address = f"{self._base}samples/{quote(name)}"
        if one is not None:
            return self._member(name, run, one, color)
        is_plain = only == ANY and not text
        links = [
            fragments.link(f"{address}?choice={each}&color={color}", each)
            if each != choice or not is_plain
            else fragments.Raw(f"<b>{each}</b>")
            for each in Choice
        ]
        content = (self._search if text else self._chosen)(name, run, query)
        form = filter_form(address, text, choice, only, color)
        return page.PageContent(f"{self._head(name, 'samples')}<nav>{' '.join(links)}</nav>{form}{content}")

    def group(self, name: str, query: Query) -> page.PageContent:
        """All attempts at one prompt side by side, its row, and how the row went over the run."""
        run, group_id, color = self._run(name), _number(query, "id"), _color(query)
        if group_id is None:
            raise DataError("which group? Its address ends with ?id= and a number")
        group = read_group(run.run, run.config, run.tokenizer, group_id, _number(query, "before"))
        row = self._row(run, group.group_id, group.row_id, group.prompt)
        html = group_page(
            group, row, color, groups=self._groups(name, color), trajectories=self._trajectories(name, color)
        )
        return page.PageContent(self._head(name, "group") + html, again=row.again)

    def speed(self, name: str, query: Query) -> page.PageContent:
        """Where the run is slow. With `outlook` also what a change would give, which takes seconds."""
        run = self._run(name).run
        answer = self._forecasts.of(run) if _one(query, "outlook") else speed_of(run, on_page=True)
        address = f"{self._base}speed/{quote(name)}?outlook=1"
        return page.PageContent(self._head(name, "speed") + speed_section(answer, address))

    def config(self, name: str, query: Query) -> page.PageContent:
        run = self._run(name)
        run.config = run.run.read_config()
        return page.PageContent(self._head(name, "config") + run.configuration())

    def curves(self, name: str, query: Query) -> page.PageContent:
        """Chosen metrics of a run, over a range of its versions."""
        choices = replace(CurveChoices.of(query), runs=(), group="")
        run = self._read([name], read_s=inf)[0][0]
        drawn = CurveSet({name: [run.steps]}, choices)
        html = curve_form(f"{self._base}curves/{quote(name)}", drawn) + notes(drawn)
        files = CurveSet(drawn.members, replace(choices, runs=(name,)))
        return page.PageContent(
            f"{self._head(name, 'curves', choices.address())}{html}{cards(files, self._base)}"
        )

    def compare(self, query: Query) -> page.PageContent:
        """Curves of several runs or groups of runs, figures, and the keys that differ."""
        choices = CurveChoices.of(query)
        if not choices.runs:
            return page.PageContent("<h1>Compare</h1>" + fragments.notice("Choose runs in the list of runs."))
        rows = self._rows_of(choices.runs)
        groups = RunGroups.of(rows, choices.group)
        runs, again = self._read(groups.names, read_s=CURVES_READ_S, figures=not groups.grouped)
        html = comparison_page(self._base, groups, _curve_set(groups, runs, choices), runs, rows)
        late = "Not all steps are read yet. The page loads itself again."
        return page.PageContent(fragments.notice(late) * (again and groups.grouped) + html, again=again)

    def curve_file(self, kind: str, query: Query) -> CurveFile:
        """One curve of runs as `kind`. Raises: DataError: there is no such curve."""
        choices = CurveChoices.of(query)
        groups = RunGroups.of(self._rows_of(choices.runs), choices.group)
        runs, _ = self._read(groups.names, read_s=inf)
        return curve_file(_curve_set(groups, runs, choices), kind)

    def home(self) -> str:
        """The link to the list of runs, for the head of every page."""
        return f"<nav>{fragments.link(self._base, 'All runs')}</nav>"

    # ------------------------------------------------------------ parts of pages

    def _curations(self) -> dict[str, Path]:
        paths = [path.parent for pattern in ("*", "*/*") for path in self._root.glob(f"{pattern}/{SUMMARY}")]
        return {path.relative_to(self._root).as_posix(): path for path in sorted(paths)}

    def _member(self, name: str, run: Overview, trajectory_id: int, color: TokenColor) -> page.PageContent:
        """One trajectory, with the advantage that its group gives it."""
        found = read_member(run.run, run.config, run.tokenizer, trajectory_id)
        if found is None:
            return page.PageContent(self._head(name, "samples") + fragments.samples([]))
        row = self._row(run, found.group_id, found.row_id, found.prompt)
        colors = fragments.TokenColors(color, largest=known_largest(found.advantages))
        shown = fragments.samples(found.members, colors, groups=self._groups(name, color))
        html = f"{shown}<h2>Its row</h2>{row_columns(row)}{about(found)}"
        return page.PageContent(self._head(name, "samples") + html, again=row.again)

    def _chosen(self, name: str, run: Overview, query: Query) -> str:
        """The chosen trajectories. With a filter, how many it lets through."""
        choice, only, color = _choice(query), _filter(query), _color(query)
        num = min(SHOWN_MAX, _number(query, "num") or SHOWN)
        shown = choose(run.run, run.tokenizer, choice, num, only=only)
        summary = ""
        if only != ANY:
            every = count(run.run, choice, only)
            summary = f'<p class="quiet">{filtered_line(every, len(shown))}</p>'
        address = f"{self._base}samples/{quote(name)}?choice={choice}&color={color}{in_address(only)}"
        more = fragments.link(f"{address}&num={2 * num}", "Show more")
        html = summary + self._drawn(name, shown, color)
        return html + (f"<p>{more}</p>" if len(shown) == num < SHOWN_MAX else "")

    def _search(self, name: str, run: Overview, query: Query) -> str:
        text, only, color = _one(query, "text"), _filter(query), _color(query)
        num = min(SHOWN_MAX, _number(query, "num") or SHOWN)
        results = search(run.run, run.tokenizer, text, num, _number(query, "before"), only)
        shown = [shown_of(sample, run.tokenizer) for sample in results.samples]
        on = f"{self._base}samples/{quote(name)}?text={quote(text, errors='replace')}{in_address(only)}"
        link = fragments.link(f"{on}&color={color}&before={results.before}", "Look further back")
        summary = f"{results.summary(only)} {link if results.before is not None else ''}"
        return f'<p class="quiet">{summary}</p>{self._drawn(name, shown, color)}'

    def _drawn(self, name: str, shown: list[Shown], color: TokenColor) -> str:
        groups, trajectories = self._groups(name, color), self._trajectories(name, color)
        colors = fragments.TokenColors(color)
        return fragments.samples(shown, colors, groups=groups, trajectories=trajectories)

    def _row(self, run: Overview, group_id: int, row_id: str, prompt: str) -> TaskRow:
        if run.name not in self._rows:
            self._rows[run.name] = TaskRows(run.config, lambda: run.tokenizer)
        return self._rows[run.name].row(group_id, row_id, prompt)

    def _groups(self, name: str, color: str) -> str:
        return f"{self._base}group/{quote(name)}?color={color}&id="

    def _trajectories(self, name: str, color: str) -> str:
        return f"{self._base}samples/{quote(name)}?color={color}&trajectory="

    def _head(self, name: str, view: str, kept: str = "") -> str:
        """The name of a run and the links to its pages. `kept`: choices of its curves, as a query string."""
        links = [
            f'<a href="{self._base}{one}/{quote(name)}{escape(kept) if one in ("run", "curves") else ""}"'
            f"{' aria-current=page' * (one == view)}>{label}</a>"
            for one, label in _VIEWS.items()
        ]
        return f"<h1>{fragments.safe(name)}</h1><nav>{''.join(links)}</nav>"

    def _rows_of(self, names: Sequence[str]) -> list[RunRow]:
        """Raises: DataError: a run is gone."""
        rows = {row.name: row for row in self._run_rows.of(find_runs(self._root))}
        if gone := [name for name in names if name not in rows]:
            raise DataError(f"there is no run {', '.join(gone)} in {self._root} any more")
        return [rows[name] for name in names]

    def _read(
        self, names: Sequence[str], *, read_s: float, figures: bool = False
    ) -> tuple[list[Overview], bool]:
        """The runs with what is new in them, and whether some of it is not read yet."""
        found = {} if all(name in self._kept for name in names) else find_runs(self._root)
        runs, until_s, late = [self._run(name, found) for name in names], time.monotonic() + read_s, False
        for run in runs:
            if figures:
                run.update()
                late |= not run.is_whole
            elif time.monotonic() < until_s:
                run.steps.update()
            else:
                late = True
        return runs, late

    def _axes(self, address: str, by: Axis) -> str:
        links = [
            fragments.Raw(f"<b>{AXES[one]}</b>")
            if one is by
            else fragments.link(f"{self._base}{address}by={one.value}", AXES[one])
            for one in Axis
        ]
        return f'<nav><span class="quiet">Curves by</span> {" ".join(links)}</nav>'

    def _run(self, name: str, found: Mapping[str, RunDirectory] | None = None) -> Overview:
        """The overview that an earlier request made, unless the run's directory is gone. `found`: the runs
        there, if they are known."""
        kept = self._kept.pop(name, None)
        if kept is None or not kept.run.config.exists():
            runs = found or find_runs(self._root)
            if name not in runs:
                raise DataError(f"there is no run {name} in {self._root} any more")
            kept = Overview(name, runs[name], f"{self._base}samples/{quote(name)}")
            self._rows.pop(name, None)
        self._kept[name] = kept
        while len(self._kept) > KEPT_MAX:
            self._rows.pop(oldest := next(iter(self._kept)), None)
            del self._kept[oldest]
        return kept


def trouble(error: Exception, *, again: bool = True) -> str:
    """The notice that a page shows instead of a traceback. `again`: the page loads itself again."""
    if isinstance(error, MillraceError):
        return fragments.notice(str(error))
    if isinstance(error, TimeoutError):
        then = "The page loads itself again." if again else "Load the page again in a minute."
        return fragments.notice(f"This took too long: the machine is busy. {then}")
    return fragments.notice(f"{type(error).__name__}: {error}")


def _curve_set(groups: RunGroups, runs: Sequence[Overview], choices: CurveChoices) -> CurveSet:
    steps = {run.name: run.steps for run in runs}
    members = {label: [steps[row.name] for row in rows] for label, rows in groups.members.items()}
    return CurveSet(members, choices, groups.grouped)


def _one(query: Query, name: str) -> str:
    return (query.get(name) or [""])[0]


def _number(query: Query, name: str) -> int | None:
    value = _one(query, name)
    return int(value) if value.isascii() and value.isdigit() and len(value) < 19 else None


def _decimal(query: Query, name: str) -> float | None:
    try:
        value = float(_one(query, name))
    except ValueError:
        return None
    return value if isfinite(value) else None


def _filter(query: Query) -> SampleFilter:
    """What makes no sense is left out."""
    state = _one(query, "state")
    return SampleFilter(
        state=state if state in list(State) else "",
        reason=_one(query, "reason"),
        reward_min=_decimal(query, "reward_min"),
        reward_max=_decimal(query, "reward_max"),
        tokens_min=_number(query, "tokens_min"),
        tokens_max=_number(query, "tokens_max"),
    )


def _color(query: Query) -> TokenColor:
    value = _one(query, "color")
    return TokenColor(value) if value in list(TokenColor) else TokenColor.LOGPROB


def _axis(query: Query) -> Axis:
    value = _one(query, "by")
    return Axis(value) if value in list(Axis) else Axis.STEP


def _choice(query: Query) -> Choice:
    value = _one(query, "choice")
    return Choice(value) if value in list(Choice) else Choice.NEWEST
