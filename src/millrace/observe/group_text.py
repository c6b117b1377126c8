"""A group of trajectories for a terminal: its row, its attempts, and how the row went over the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from millrace.observe.samples import clipped, panel, panels_of
from millrace.observe.sparkline import sparkline
from millrace.observe.terminal import harmless

METRICS_MAX = 6
"""The most own metrics that have a column. `--json` has all of them."""
NO_TOKENS: Mapping[int, Sequence[RenderableType]] = MappingProxyType({})


def render_group(
    view: Mapping[str, Any], tokens: Mapping[int, Sequence[RenderableType]] = NO_TOKENS
) -> Group:
    """A record of `look.record.group.group_view`. `tokens` of trajectories, by id: as of `panels_of`."""
    attempts = view["attempts"]
    states = ", ".join(f"{num} {state}" for state, num in view["states"].items())
    parts: list[RenderableType] = [
        Text(harmless(f"\ngroup {view['group_id']}, row {view['row_id']}, {states}"), style="bold"),
        panel("prompt", clipped(view["prompt"])),
    ]
    if view["answer"] is not None:
        parts.append(panel("reference answer", view["answer"]))
    columns = view["columns"].items()
    parts += [_table("Other columns of the row", ["column", "value"], columns)] if columns else []
    parts.append(_attempts(attempts))
    notes = (view[f"{what}_unknown"] for what in ("columns", "advantages", "ratios"))
    parts += [Text(harmless(note), style="dim") for note in notes if note]
    for one in attempts:
        title = f"trajectory {one['trajectory_id']}, {_earned(one)}"
        parts += panels_of(one, tokens.get(one["trajectory_id"], ()), title)
    return Group(*parts, *_history(view["history"], view["group_id"]))


def _attempts(attempts: Sequence[Mapping[str, Any]]) -> Group:
    names = list(dict.fromkeys(name for one in attempts for name in one["metrics"]))[:METRICS_MAX]
    head = ["id", "reward", "advantage", "tokens", "ended by", "state", "versions", *names]
    rows = [
        (
            one["trajectory_id"],
            one["reward"],
            _advantage(one),
            one["num_tokens"],
            one["finish"],
            f"{one['state']}: {one['reason']}" if one["reason"] else one["state"],
            _range(one["versions"]),
            *(one["metrics"].get(name) for name in names),
        )
        for one in attempts
    ]
    return _table("Attempts", head, rows)


def _history(history: Mapping[str, Any], group_id: int) -> list[RenderableType]:
    """Each draw of the row, the newest first."""
    draws, first = history["draws"], history["looked_back_to_group"]
    head = ["group", "trained into", "sampled by", "mean reward", "mean tokens", "longest", "states"]
    rows = [
        (
            f"{draw['group_id']} (this)" if draw["group_id"] == group_id else draw["group_id"],
            ", ".join(map(str, draw["trained"])),
            _range(draw["sampled"] or ()),
            draw["reward_mean"],
            draw["tokens_mean"],
            draw["tokens_max"],
            f"skipped: {draw['skipped']}"
            if draw["skipped"]
            else ", ".join(f"{num} {state}" for state, num in draw["states"]),
        )
        for draw in draws
    ]
    parts: list[RenderableType] = [_table("The row over the run", head, rows)]
    rewards = [draw["reward_mean"] for draw in reversed(draws) if draw["reward_mean"] is not None]
    if len(rewards) > 1:
        line = (
            f"mean reward, the oldest first: {sparkline(rewards)} ({min(rewards):.3g} to {max(rewards):.3g})"
        )
        parts.append(Text(line))
    if first:
        parts.append(Text(f"Only groups from {first:,} on were looked at.", style="dim"))
    return parts


def _earned(one: Mapping[str, Any]) -> str:
    reward = "no reward" if one["reward"] is None else f"reward {one['reward']:.4g}"
    advantage = _advantage(one)
    return f"{reward}, advantage {advantage}" if advantage else reward


def _advantage(one: Mapping[str, Any]) -> str:
    return "not trained" if one["masked"] else ", ".join(f"{value:.3g}" for value in one["advantages"])


def _range(versions: Sequence[int]) -> str:
    if not versions:
        return ""
    first, last = min(versions), max(versions)
    return str(first) if first == last else f"{first} to {last}"


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Group:
    table = Table(box=None, pad_edge=False)
    for name in head:
        table.add_column(harmless(name), overflow="fold")
    for row in rows:
        table.add_row(*(Text(_written(value)) for value in row))
    return Group(Text(f"\n{title}", style="bold"), table)


def _written(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value in (None, "") else harmless(str(value))
