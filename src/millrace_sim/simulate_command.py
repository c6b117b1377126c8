"""`millrace simulate`: the real controller over a modelled cluster, in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

from millrace.cli.options import AsJson, Overrides, print_json
from millrace.config.load import load, load_as
from millrace.config.schema import Config
from millrace.config.tables.section import Section
from millrace.core.wings import wing
from millrace.observe.terminal import Terminal, typed
from millrace_sim.compare import (
    OF_BATCHES,
    QUANTITIES,
    Comparison,
    ComparisonProgress,
    OnProgress,
    base_scenario,
    compared,
    verdict,
)
from millrace_sim.config import SimulatedConfig
from millrace_sim.explore.verdicts import Exploration, Verdict, explore

console = Terminal(soft_wrap=True)

PRINTED_EVERY = 1_000
"""A line is printed after so many explored worlds if no progress bar can be shown."""

WATCHED = (BarColumn(24), TextColumn("{task.description}", markup=False))
BUSY = ("trainer busy", "replicas busy", "KV used")
HEADING = ("schedule", "step s", "tok/s", *BUSY, "staleness", "max", "fair")


def command(
    config_file: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="A TOML file; none with --chaos or --from.")
    ] = None,
    overrides: Overrides = None,
    versus: Annotated[
        str, typer.Option("--compare", metavar="NAMES", help="`presets`, or some of them with commas.")
    ] = "",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each schedule, for confidence intervals.")] = 1,
    seed: Annotated[int | None, typer.Option(help="The first seed. Default: the configuration's.")] = None,
    from_run: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="Lengths and costs from a run's directory.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots and a timeline.")] = None,
    chaos: Annotated[int, typer.Option(min=0, help="Explore this many seeded worlds full of faults.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Predict a run on a cluster that need not exist, or look for faults in the protocol."""
    if chaos:
        _explore(config_file, overrides or [], seed or 0, chaos, jobs, as_json)
        return
    schema: type[Section] = SimulatedConfig if from_run is None else Config
    config = load_as(schema, config_file, overrides or []) if config_file else None
    base = base_scenario(config, from_run, seed)
    with _progress(as_json) as on_progress:
        names = versus.split(",") if versus else ()
        comparisons = compared(base, names, seeds=seeds, jobs=jobs, on_progress=on_progress)
    rows = [HEADING, *(_row(comparison) for comparison in comparisons)]
    if html is not None:
        text: str = wing("ui.simulated")(_title(config_file, from_run), base, comparisons, rows[1:])
        html.write_text(text, encoding="utf-8")
    if as_json:
        print_json({comparison.name: _as_dict(comparison) for comparison in comparisons}, indent=None)
        return
    console.print(_table(rows))
    console.print()
    for sentence in verdict(comparisons):
        console.print(sentence)
    if html is not None:
        console.print(f"Plots and timeline: {html}")


@contextmanager
def _progress(as_json: bool) -> Iterator[OnProgress]:
    """Shows a bar on a terminal; elsewhere a line on stderr for each run that ends. With JSON it shows
    nothing."""
    shown = console.is_terminal and not as_json
    with Bar(*WATCHED, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("simulating", total=1.0)

        def on_progress(progress: ComparisonProgress) -> None:
            if shown:
                bar.update(task, completed=progress.share, description=progress_line(progress))
            elif not as_json and progress.version == progress.steps:
                Terminal(stderr=True, soft_wrap=True).print(progress_line(progress))

        yield on_progress


def progress_line(progress: ComparisonProgress) -> str:
    """The run, its step and its virtual time."""
    events = f", {progress.num_events:,} events" if progress.num_events else ""
    return (
        f"run {progress.run} of {progress.runs}, {progress.schedule}, seed {progress.seed}: step "
        f"{progress.version} of {progress.steps}, {progress.virtual_s / 60:,.1f} virtual minutes{events}"
    )


def _title(config_file: Path | None, run: Path | None) -> str:
    return f"Simulated: {(config_file or run or Path('run')).stem}"


def _row(comparison: Comparison) -> tuple[str, ...]:
    step, rate, *fractions, staleness = (comparison.estimate(name) for name in QUANTITIES)
    return (
        comparison.name,
        f"{step.mean:.1f}" + (f" ± {step.half_width:.1f}" if step.half_width else ""),
        f"{rate.mean:,.0f}" + (f" ± {rate.half_width:,.0f}" if rate.half_width else ""),
        *(f"{fraction.mean:.0%}" for fraction in fractions),
        f"{staleness.mean:.2f}",
        str(max(result.staleness_max for result in comparison.results)),
        "-" if (fair := comparison.known("fairness")) is None else f"{fair.mean:.2f}",
    )


def _as_dict(comparison: Comparison) -> dict[str, Any]:
    estimates = {name: comparison.estimate(name) for name in QUANTITIES}
    known = {name: comparison.known(name) for name in OF_BATCHES}
    return {
        "estimates": {name: one and asdict(one) for name, one in (estimates | known).items()},
        "runs": [result.as_dict() for result in comparison.results],
    }


def _table(rows: list[tuple[str, ...]]) -> Table:
    """Headings break between words, cells never, so that the table fits into 80 columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for index, (heading, *cells) in enumerate(zip(*rows, strict=True)):
        widest = max(map(len, [*heading.split(), *cells]))
        table.add_column(heading, justify="right" if index else "left", width=widest)
    for row in rows[1:]:
        table.add_row(*row)
    return table


# ---------------------------------------------------------------- chaos


def _explore(
    config_file: Path | None, overrides: list[str], seed: int, count: int, jobs: int, as_json: bool
) -> None:
    """Exit code 1 if a seed fails. Each failure is printed with the command that replays it."""
    config = load(config_file, overrides) if config_file else None
    words = [f"{typed()} simulate", *([str(config_file)] if config_file else [])]
    with Bar(console=console, transient=True, disable=as_json or not console.is_terminal) as progress:
        bar = progress.add_task("worlds", total=count)

        def on_seed(verdict: Verdict) -> None:
            progress.advance(bar)
            done = verdict.seed - seed + 1
            if verdict.problem and not as_json:
                console.print(f"seed {verdict.seed} ({verdict.schedule}): {verdict.problem}")
                console.print(f"  replay: {verdict.command}")
            if progress.disable and not as_json and done % PRINTED_EVERY == 0 and done < count:
                console.print(f"{done:,} of {count:,} worlds")

        report = explore(seed, count, jobs=jobs, on_seed=on_seed, config=config, command=" ".join(words))
    if as_json:
        print_json(asdict(report), indent=None)
    else:
        console.print(_summary(report))
    raise typer.Exit(0 if report.ok else 1)


def _summary(report: Exploration) -> str:
    last = report.first_seed + report.count - 1
    return (
        f"Seeds {report.first_seed} to {last}: {len(report.failures)} failed. {report.restarts:,} restarts, "
        f"{report.resumes:,} resumes, {report.num_events:,} events, "
        f"{report.virtual_s / 3600:.1f} h of virtual time."
    )
