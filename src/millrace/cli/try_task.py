"""`millrace try-task`: the reward on answers of known worth, or one episode of an environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from millrace.cli.options import AsJson, ConfigFile, Overrides, print_json
from millrace.config.load import load
from millrace.config.schema import Config
from millrace.evaluation.trials import judge, play, run_trials
from millrace.observe.shown_samples import METRICS_MAX
from millrace.observe.terminal import Terminal, harmless
from millrace.run.going_on import checkable
from millrace.tasks.families import family_notes

TEXT_SHOWN, PROMPT_SHOWN, ROW_SHOWN = 16, 1000, 18
"""Characters of a completion, of a prompt and of a row's name. The table fits into 80 columns."""


def command(
    config_file: ConfigFile,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option("-n", min=1, help="How many rows of the task.")] = 8,
    completion: Annotated[
        list[str] | None,
        typer.Option(help="Also try this text; with an environment, a turn of one episode. Repeatable."),
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Print the token ids of an episode.")] = False,
    as_json: AsJson = False,
) -> None:
    """Call the reward on right, empty and odd answers, and judge it; or play one episode of an environment.
    Exit code 1 if a call fails."""
    config = checkable(load(config_file, overrides or ()))
    if config.reward.kind == "environment":
        _play(config, completion or [], tokens, as_json)
        return
    results = run_trials(config, rows, completion or [])
    warnings = [*judge(results), *family_notes(config)]
    if as_json:
        print_json({"trials": results, "warnings": warnings})
    else:
        _print(results, warnings)
    if any(r["outcome"] == "failed" for r in results):
        raise typer.Exit(1)


def _play(config: Config, actions: list[str], tokens: bool, as_json: bool) -> None:
    """One episode, turn by turn."""
    episode = play(config, actions)
    if as_json:
        print_json(episode)
    else:
        _print_episode(episode, tokens)
    if episode["outcome"] == "failed":
        raise typer.Exit(1)


def _print_episode(episode: dict[str, Any], tokens: bool) -> None:
    console = Terminal(soft_wrap=True)

    def part(title: str, text: str, ids: list[int]) -> None:
        console.print(f"{title}, {len(ids)} tokens:", style="bold")
        for line in text[:PROMPT_SHOWN].splitlines() or [""]:
            console.print(f"  | {line}", markup=False)
        if tokens:
            console.print(f"  {' '.join(map(str, ids))}", markup=False)

    part(f"The prompt of {episode['row']}", episode["prompt"], episode["prompt_tokens"])
    for number, turn in enumerate(episode["turns"], 1):
        part(f"Turn {number}, the model", turn["action"], turn["action_tokens"])
        reward = "" if turn["reward"] is None else f", reward {turn['reward']:g}"
        if turn["answer_tokens"]:
            part(f"Turn {number}, the environment{reward}", turn["answer"], turn["answer_tokens"])
    console.print(_outcome(episode), markup=False)


def _outcome(episode: dict[str, Any]) -> str:
    if episode["outcome"] == "observed":
        return "The episode goes on: give its next turn with --completion TEXT."
    if episode["outcome"] != "scored":
        return f"The episode {episode['outcome']}: {episode['reason']}"
    metrics = (f"{name} {value:g}" for name, value in sorted(episode["metrics"].items()))
    return f"The episode ends with reward {episode['value']:g} ({', '.join(metrics)})."


def _print(results: list[dict[str, Any]], warnings: list[str]) -> None:
    console = Terminal(soft_wrap=True)
    first = results[0]
    console.print(f"The prompt of {first['row']}, {first['prompt_tokens']} tokens:", style="bold")
    for line in first["prompt"][:PROMPT_SHOWN].splitlines() or [""]:
        console.print(f"  | {line}", markup=False)
    console.print()
    console.print(_table(results))
    if names := list(dict.fromkeys(name for r in results for name in r["metrics"]))[:METRICS_MAX]:
        console.print("\nMetrics of the reward:", style="bold")
        console.print(_metrics(results, names))
    for line in _reasons(results):
        console.print(line)
    for warning in warnings:
        console.print(f"Warning: {warning}.", style="yellow")


def _table(results: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("row", "completion", "", "outcome", "value", "seconds"):
        table.add_column(name, overflow="fold")
    for r in results:
        text = r["completion"]
        shown = repr(text if len(text) <= TEXT_SHOWN + 3 else text[:TEXT_SHOWN] + "...")
        value = "" if r["value"] is None else f"{r['value']:g}"
        cells = (_short(r["row"]), r["kind"], shown, r["outcome"], value, f"{r['seconds']:.3f}")
        table.add_row(*map(Text, cells))
    return table


def _metrics(results: list[dict[str, Any]], names: list[str]) -> Table:
    """As a table of its own: a terminal has no room beside the values."""
    table = Table(box=None, pad_edge=False)
    for name in ("row", "completion", *names):
        table.add_column(harmless(name), overflow="fold")
    for r in results:
        values = (r["metrics"].get(name) for name in names)
        written = ("-" if value is None else f"{value:.4g}" for value in values)
        table.add_row(*map(Text, (_short(r["row"]), r["kind"], *written)))
    return table


def _reasons(results: list[dict[str, Any]]) -> Iterator[str]:
    """Each reason once, with its count."""
    for reason, num in Counter(r["reason"] for r in results if r["reason"]).most_common():
        yield f"{num} of {len(results)} calls: {reason}"


def _short(row_id: str) -> str:
    """The end of a row's name, because the ends differ."""
    return row_id if len(row_id) <= ROW_SHOWN else "..." + row_id[3 - ROW_SHOWN :]
