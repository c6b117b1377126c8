"""One or several runs as one HTML file, which needs no server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from millrace.config.freeze import dump
from millrace.core.errors import OTHER_FILE, ConfigError, writing
from millrace.ledger.samples import Choice
from millrace.observe.sinks.log_files import parts
from millrace.run.resume import flat
from millrace.run_directory.run_directory import RunDirectory
from millrace_ui import page
from millrace_ui.curves.cards import cards, legend
from millrace_ui.curves.chart import run_cards
from millrace_ui.curves.choices import CurveChoices
from millrace_ui.curves.comparison_page import configurations
from millrace_ui.curves.curve_lines import CurveSet
from millrace_ui.drawing import fragments
from millrace_ui.drawing.bars import timeline_card
from millrace_ui.overview import TIMELINE, Overview, overviews
from millrace_ui.record.runs import RunRow
from millrace_ui.record.steps import Axis
from millrace_ui.record.tokens import Shown, choose
from millrace_ui.speed_answer import speed_of, speed_section

BYTES_MAX = 2_000_000
POINTS = 400
"""Points of a curve in a file, of all runs together."""
SAMPLES, SAMPLE_TOKENS = 4, 250


def report_runs(runs: Sequence[RunDirectory], out: Path) -> int:
    """As `write_report`, each run under the shortest name that tells it from the others."""
    return write_report(overviews(runs), out)


def write_report(runs: Sequence[Overview], out: Path) -> int:
    """Read the runs to their ends, write the file, and return its size in bytes.

    Raises: ConfigError: too many runs for one file. StorageError: the file cannot be written.
    """
    for run in runs:
        run.update(read_s=float("inf"))
    text = report(runs).encode()
    if len(text) > BYTES_MAX:
        raise ConfigError(
            f"the report of {len(runs)} runs has {len(text):,} bytes; a report has at most {BYTES_MAX:,}\n"
            "  Name fewer runs."
        )
    with writing(out, OTHER_FILE):
        out.write_bytes(text)
    return len(text)


def report(runs: Sequence[Overview]) -> str:
    """The whole document. The other runs are compared with the first run."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    bodies = [_compared(runs)] if len(runs) > 1 else []
    bodies += [_run(run, max(2, POINTS // len(runs))) for run in runs]
    return page.whole_file(title, "".join(bodies))


def _compared(runs: Sequence[Overview]) -> str:
    curves = CurveSet({run.name: [run.steps] for run in runs}, CurveChoices())
    rows = {run.name: [RunRow(run.name, keys=dict(flat(dump(run.config))))] for run in runs}
    return (
        f"<h1>{len(runs)} runs compared</h1>{legend(curves)}"
        f"{cards(curves, points=max(2, POINTS // len(runs)))}"
        f"<h2>What differs in their configurations</h2>{configurations(rows)}"
    )


def _run(run: Overview, points: int) -> str:
    html = run.html_by_id()
    return (
        f"<h1>{fragments.safe(run.name)}</h1>{html['facts']}{html['notice']}{html['findings']}"
        f'<div class="charts">{run_cards(run.charts(Axis.STEP, points))}'
        f'<section class="chart whole"><h2>Where the time went</h2>{html["spent"]}</section>'
        f"{timeline_card('Timeline', TIMELINE, html['lanes'])}</div>"
        f"{_speed(run)}<h2>Troubles</h2>{html['troubles']}{_samples(run)}<h2>Configuration</h2>{run.configuration()}"
    )


def _speed(run: Overview) -> str:
    """Nothing of a run without steps, or of one that was copied without its events."""
    return speed_section(speed_of(run.run)) if run.version and parts(run.run.events) else ""


def _samples(run: Overview) -> str:
    shown = {choice: choose(run.run, run.tokenizer, choice, SAMPLES, SAMPLE_TOKENS) for choice in Choice}
    return "".join(
        f"<h2>Trajectories: {choice.value}</h2>{_colored(chosen, run.name, choice)}"
        for choice, chosen in shown.items()
        if chosen
    )


def _colored(chosen: Sequence[Shown], name: str, choice: Choice) -> str:
    return fragments.samples(chosen, fragments.TokenColors(field=f"{name} {choice}"))
