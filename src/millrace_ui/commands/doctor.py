"""`millrace doctor`: faults of a run, their evidence and their remedies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.table import Table

from millrace.checks.numerics import (
    ProbedSequence,
    SideVerdict,
    examine_sides,
    random_sequence,
    recorded_sequence,
    write_jax_values,
)
from millrace.cli.options import AsJson, Run, print_json
from millrace.config.load import load
from millrace.config.schema import Config
from millrace.diagnose.examine import diagnosis_of
from millrace.observe.terminal import Terminal
from millrace.run_directory import run_directory
from millrace.run_directory.models import export, served_config

Numerics = Annotated[
    bool, typer.Option("--numerics", help="Find where log-probs diverge first. RUN may be a TOML file.")
]
Version = Annotated[
    int, typer.Option(min=0, help="With --numerics: of which checkpoint; 0 is the model it began with.")
]
NumTokens = Annotated[int, typer.Option(min=2, help="With --numerics: of the sequence, at most.")]
JaxValues = Annotated[Path | None, typer.Option(hidden=True)]


def command(
    run: Run,
    as_json: AsJson = False,
    numerics: Numerics = False,
    version: Version = 0,
    tokens: NumTokens = 128,
    values: JaxValues = None,
) -> None:
    """Look for known faults in a run, live or ended. Exit code 1 if there is one."""
    if values is not None:
        typer.echo(write_jax_values(run, values))
    elif numerics:
        _numerics(run, version, tokens, as_json)
    else:
        _faults(run, as_json)


def _faults(run: Path, as_json: bool) -> None:
    diagnosis = diagnosis_of(run_directory.find(run))
    if as_json:
        print_json(diagnosis.to_json())
    else:
        Terminal(soft_wrap=True).print(diagnosis)
    if not diagnosis.healthy:
        raise typer.Exit(1)


def _numerics(path: Path, version: int, num_tokens: int, as_json: bool) -> None:
    with _subject(path, version, num_tokens) as (config, model, sequence):
        verdicts = list(examine_sides(config, model, sequence, lambda line: typer.echo(line, err=True)))
    if as_json:
        print_json([asdict(verdict) for verdict in verdicts])
    else:
        Terminal(soft_wrap=True).print(*_shown(verdicts), sep="\n")
    if any(verdict.first is not None for verdict in verdicts):
        raise typer.Exit(1)


@contextmanager
def _subject(path: Path, version: int, num_tokens: int) -> Iterator[tuple[Config, Path, ProbedSequence]]:
    """Configuration, the directory of the weights, and a sequence."""
    if path.suffix == ".toml":
        with served_config(load(path)) as (config, _):
            model = Path(config.model.path)
            yield config, model, random_sequence(config, model, num_tokens)
        return
    run = run_directory.find(path)
    config = run.read_config()
    with TemporaryDirectory(prefix="millrace-") as scratch:
        model = Path(config.model.path)
        if version:
            model = Path(scratch) / "model"
            export(run, version, model)
        sequence = recorded_sequence(config, run.ledger, version, num_tokens)
        yield config, model, sequence or random_sequence(config, model, num_tokens)


def _shown(verdicts: list[SideVerdict]) -> list[Table | str]:
    """A row for each side, and a line for each that diverges."""
    table = Table("side", "format", "gap max", "gap mean", "first divergence", box=None, pad_edge=False)
    for verdict in verdicts:
        gaps = f"{verdict.gap_max:.1e}", f"{verdict.gap_mean:.1e}"
        place = "none" if verdict.first is None else verdict.first.place
        table.add_row(verdict.side, verdict.computing, *gaps, place)
    return [table, *(f"{v.side} diverges at {v.first}" for v in verdicts if v.first is not None)]
