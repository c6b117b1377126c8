"""`millrace curate`: drops rows of a task before a run, and writes those that are worth training on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from millrace.cli.options import AsJson, ConfigFile, Overrides, print_json
from millrace.config.load import load
from millrace.config.schema import Config
from millrace.config.tables.task import (
    FileTaskSection,
    FunctionTaskSection,
    GymTaskSection,
    HubTaskSection,
    RowsSection,
)
from millrace.core.errors import OTHER_FILE, ConfigError, writing
from millrace.core.wings import wing
from millrace.observe.live.live_view import progress_line
from millrace.observe.terminal import Terminal
from millrace.run_directory.models import served_config
from millrace.runtime.process import check_kernel

if TYPE_CHECKING:
    from millrace_curation.curate import CurationOptions


Out = Annotated[Path, typer.Option(metavar="DIR", help="A new directory for the results.")]
Against = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE[:COLUMN]", help="Rows of evaluations, which no kept row repeats. Repeatable."),
]
Ngram = Annotated[int, typer.Option(min=5, help="Words in a row that show a repeated text.")]
Near = Annotated[
    float, typer.Option(min=0.3, max=1.0, help="Similarity of near duplicates. 1: only exact ones.")
]
LeastTokens = Annotated[int, typer.Option(min=1, help="The fewest tokens of a prompt.")]
MostTokens = Annotated[int | None, typer.Option(min=1, help="The most. Default: the run's room.")]
Gold = Annotated[
    bool | None,
    typer.Option(help="Try the reward on right and wrong answers. Default: if rows have answers."),
]
GoldTemplate = Annotated[str, typer.Option(help="A completion with a right answer.")]
Samples = Annotated[
    int, typer.Option(min=0, max=1024, help="Completions a row, for pass rates. 0: no model is run.")
]
Model = Annotated[Path | None, typer.Option(help="A model, a checkpoint or a run. Default: `model.path`.")]
CorrectAt = Annotated[float, typer.Option(help="A reward of at least this is correct.")]
KeepHard = Annotated[bool, typer.Option(help="Keep rows that no sample answers.")]
KeepEasy = Annotated[bool, typer.Option(help="Keep rows that every sample answers.")]
Resume = Annotated[bool, typer.Option(help="Go on in DIR. What is measured there is not repeated.")]


def command(
    config_file: ConfigFile,
    out: Out,
    overrides: Overrides = None,
    against: Against = None,
    ngram: Ngram = 8,
    near: Near = 0.8,
    min_tokens: LeastTokens = 1,
    max_tokens: MostTokens = None,
    gold: Gold = None,
    gold_template: GoldTemplate = "{answer}",
    samples: Samples = 0,
    model: Model = None,
    correct_at: CorrectAt = 1.0,
    keep_hard: KeepHard = False,
    keep_easy: KeepEasy = False,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Drop rows that are broken, repeated, contaminated, wrongly scored, too hard or too easy."""
    from millrace_curation.curate import CurationOptions
    from millrace_curation.output import KEPT, PAGE
    from millrace_curation.task_rows import read_evaluation_texts

    config = load(config_file, overrides or ())
    check_kernel()  # which the reward worker needs
    column = config.task.prompt if isinstance(config.task, RowsSection) else "prompt"
    texts = [text for file in against or () for text in read_evaluation_texts(file, column)]
    options = CurationOptions(
        against=texts,
        ngram=ngram,
        near=near if near < 1 else None,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        gold=gold,
        gold_template=gold_template,
        samples=samples,
        correct_at=correct_at,
        keep_hard=keep_hard,
        keep_easy=keep_easy,
    )
    _make_directory(out, resume=resume)
    summary = _curated(config, options, out, model)
    if as_json:
        print_json(summary)
        return
    console = Terminal(soft_wrap=True)
    console.print(_table(summary))
    console.print(f"Train on them: --set task.kind=file --set task.path={out / KEPT}. Look at {out / PAGE}")


def _curated(config: Config, options: CurationOptions, out: Path, model: Path | None) -> dict[str, Any]:
    """Curate, write every file, and return the summary."""
    from millrace_curation.curate import curate
    from millrace_curation.output import ATTEMPTS, summarized, write_rows, write_summary

    with served_config(config, model) as (config, _):
        with progress_line(Terminal(stderr=True), "Loading") as show:

            def on_stage(stage: str, ended: int, total: int) -> None:
                show(f"{ended:,} of {total:,} {stage}", ended == total)

            curation = curate(config, options, out / ATTEMPTS, on_stage)
    about = {
        "task": _source(config.task),
        "model": str(model or config.model.path),
    }
    summary = summarized(curation, options, about)
    write_rows(curation, out)
    write_summary(summary, out)
    wing("ui.curated")(summary, out)
    return summary


def _make_directory(out: Path, *, resume: bool) -> None:
    """Raises: ConfigError: there is a curation, and it is not to be resumed; or there is none to resume."""
    there = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if resume and not there:
        raise ConfigError(
            f"`--out` {out} has nothing to resume: leave out --resume, or name the right directory"
        )
    if there and not resume:
        raise ConfigError(f"`--out` {out} exists already: name a new directory, or go on in it with --resume")
    with writing(out, OTHER_FILE):
        out.mkdir(parents=True, exist_ok=True)


def _table(summary: dict[str, Any]) -> Table:
    table = Table(title=summary["task"], title_justify="left", box=None, show_header=False)
    for justify in ("left", "right", "right"):
        table.add_column("", justify=justify)
    total = summary["num_rows"]
    table.add_row("rows", f"{total:,}", "")
    for reason, count in summary["reasons"].items():
        table.add_row(reason, f"{count:,}", f"{count / total:.1%}")
    table.add_row("kept", f"{summary['num_kept']:,}", f"{summary['num_kept'] / total:.1%}", style="bold")
    if rates := summary["pass_rates"]:
        table.add_section()
        low, high = rates["interval"] or (math.nan, math.nan)
        mean = math.nan if rates["mean"] is None else rates["mean"]
        table.add_row(
            f"pass rate ({rates['samples']} samples each)", f"{mean:.3f}", f"{low:.3f} to {high:.3f}"
        )
        for band, count in rates["bands"].items():
            table.add_row(band, f"{count:,}", f"{count / max(1, rates['num_rows']):.1%}")
        for name in ("truncated", "unscored"):
            table.add_row(f"completions {name}", f"{rates[name]:,}", "")
    return table


def _source(task: Any) -> str:
    """What names the rows of section `[task]`."""
    match task:
        case FileTaskSection() | FunctionTaskSection():
            return task.path
        case GymTaskSection() | HubTaskSection():
            return task.name
        case _:
            return ""
