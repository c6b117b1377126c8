"""`millrace try-reward`: what the reward says of answers whose worth is known, before it is trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from millrace.cli.options import AsJson, ConfigFile, Overrides
from millrace.config.load import load
from millrace.config.schema import Config
from millrace.core.types import Abstain, Failed, Finish, Scored, ScoreRequest

GARBAGE = "lorem ipsum 42 )}]"
TEXT_SHOWN = 48


@dataclass(frozen=True)
class Trial:
    """A completion of a row: `kind` is "reference", "empty", "garbage" or "yours". The reward gets `seen`,
    what is left of `text` when it has been tokens."""

    group_id: int
    row_id: str
    kind: str
    text: str
    tokens: list[int]
    seen: str


def command(
    config_file: ConfigFile,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option("-n", min=1, help="How many rows of the task.")] = 8,
    completion: Annotated[list[str] | None, typer.Option(help="Also try this text. Repeatable.")] = None,
    as_json: AsJson = False,
) -> None:
    """Call the reward on right, empty and odd answers, and judge it. Exit code 1 if a call fails."""
    from millrace.cli import scoring

    config = load(config_file, overrides or ())
    trials = list(make_trials(config, rows, completion or []))
    requests = [
        ScoreRequest(index, trial.group_id, trial.tokens, Finish.STOP) for index, trial in enumerate(trials)
    ]
    results = [
        _result(trial, timed) for trial, timed in zip(trials, scoring.scores(config, requests), strict=True)
    ]
    warnings = list(judge(results))
    if as_json:
        typer.echo(json.dumps({"trials": results, "warnings": warnings}, indent=2))
    else:
        _print(results, warnings)
    if any(r["outcome"] == "failed" for r in results):
        raise typer.Exit(1)


def _print(results: list[dict[str, Any]], warnings: list[str]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(_table(results))
    for warning in warnings:
        console.print(f"Warning: {warning}.", style="yellow", markup=False)


def make_trials(config: Config, rows: int, own: list[str]) -> Iterator[Trial]:
    """The trials of the first `rows` usable rows, in the order that training draws them."""
    from millrace.cli import scoring
    from millrace.environments.order import row_of
    from millrace.environments.tasks import make_task
    from millrace.environments.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.model.path)
    task = make_task(config.task, tokenizer)
    for prompt in scoring.prompts(config, rows):
        columns = task.columns(row_of(prompt.group_id, task.rows, config.seed))
        texts = [("empty", ""), ("garbage", GARBAGE), *(("yours", text) for text in own)]
        if task.answer is not None:
            texts.insert(0, ("reference", str(columns[task.answer])))
        for kind, text in texts:
            tokens = tokenizer.encode(text, add_special_tokens=False)
            seen = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            yield Trial(prompt.group_id, prompt.row_id, kind, text, tokens, seen)


def judge(results: list[dict[str, Any]]) -> Iterator[str]:
    """What would spoil training: one sentence each."""
    failed = [r for r in results if r["outcome"] == "failed"]
    if failed:
        yield f"{len(failed)} of {len(results)} calls failed, the first: {failed[0]['reason']}"
    changed = [
        r for r in results if r["kind"] in ("reference", "yours") and r["seen"] != r["completion"].strip()
    ]
    if changed:
        first = changed[0]
        yield f"the tokenizer cannot write {first['completion']!r}: the reward gets {first['seen']!r}"
    right = [r["value"] for r in results if r["kind"] == "reference" and r["value"] is not None]
    wrong = [r["value"] for r in results if r["kind"] in ("empty", "garbage") and r["value"] is not None]
    if right and wrong and max(wrong) >= min(right):
        yield f"a wrong completion gets {max(wrong):g}, a reference answer only {min(right):g}"
    if all(r["kind"] in ("empty", "garbage") for r in results):
        yield "no right answer was tried, for the task has none: give one with --completion TEXT"
        return
    values = {r["value"] for r in results if r["value"] is not None}
    if len(results) > 1 and len(failed) < len(results) and len(values) < 2:
        said = f"{values.pop():g}" if values else "no opinion"
        yield f"every completion gets {said}: nothing can be learned from that"


def _result(trial: Trial, timed: Any) -> dict[str, Any]:
    score = timed.score
    return {
        "row": trial.row_id,
        "kind": trial.kind,
        "completion": trial.text,
        "seen": trial.seen.strip(),
        "outcome": type(score).__name__.lower(),
        "value": score.value if isinstance(score, Scored) else None,
        "metrics": score.metrics if isinstance(score, Scored) else {},
        "reason": score.reason if isinstance(score, (Failed, Abstain)) else "",
        "seconds": timed.seconds,
    }


def _table(results: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("row", "completion", "", "outcome", "value", "seconds"):
        table.add_column(name, overflow="fold")
    for r in results:
        shown = (
            r["completion"] if len(r["completion"]) <= TEXT_SHOWN else r["completion"][:TEXT_SHOWN] + "..."
        )
        value = "" if r["value"] is None else f"{r['value']:g}"
        detail = value or r["reason"]
        cells = (r["row"], r["kind"], repr(shown), r["outcome"], detail, f"{r['seconds']:.3f}")
        table.add_row(*(Text(str(cell)) for cell in cells))
    return table
