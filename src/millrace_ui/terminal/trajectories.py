"""Trajectories and groups for `millrace show`, read and filtered as on the pages of `millrace ui`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from millrace.ledger.reading.reader import LedgerReader
from millrace.ledger.reading.samples import ANY, Choice, Sample, SampleFilter
from millrace.observe.group_text import render_group
from millrace.observe.samples import render_sample
from millrace.run_directory.run_directory import RunDirectory
from millrace.run_directory.views import View, tokenizer_of
from millrace_ui.drawing.shades import TokenColor
from millrace_ui.record.group.advantages import advantages_of
from millrace_ui.record.group.group_view import HISTORY_S, group_view
from millrace_ui.record.group.groups import MEMBERS_MAX, shown_members
from millrace_ui.record.tokens import filtered_line, look_for, shown_of
from millrace_ui.record.views import samples_view
from millrace_ui.terminal.colored_tokens import ColoredTokens, ColorLegend, colored_passages


@dataclass(frozen=True, slots=True)
class SamplesAsked:
    """With `text`: a search from trajectory `before` back, or from the newest."""

    choice: Choice
    num: int
    only: SampleFilter
    text: str
    before: int | None


def read_samples(
    reader: LedgerReader, run: RunDirectory, asked: SamplesAsked, color: TokenColor
) -> tuple[list[View], Callable[[list[View]], RenderableType]]:
    """Records of the trajectories, and what draws them."""
    tokenizer = tokenizer_of(run)
    samples, summary = _chosen(reader, tokenizer, asked)
    tokens: dict[int, list[ColoredTokens]] = {}
    if color is not TokenColor.NONE:
        shown = [shown_of(one, tokenizer) for one in samples]
        tokens = {one.trajectory_id: colored_passages(one, color) for one in shown}
    return samples_view(samples, tokenizer), partial(_samples, summary=summary, tokens=tokens, color=color)


def read_group(
    reader: LedgerReader, run: RunDirectory, group_id: int, color: TokenColor
) -> tuple[View, Callable[[View], RenderableType]]:
    """The record of a group, and what draws it."""
    group, config, tokenizer = reader.group(group_id), run.read_config(), tokenizer_of(run)
    advantages = advantages_of(group, config)
    view = group_view(reader, group, config, tokenizer, advantages)
    known = color is not TokenColor.ADVANTAGE or advantages.by_token  # else a line of the group says why not
    if color is TokenColor.NONE or not known:
        return view, render_group
    members = shown_members(group, group.members[:MEMBERS_MAX], tokenizer, advantages)
    tokens = {one.trajectory_id: colored_passages(one, color, advantages.largest) for one in members}
    return view, lambda view: Group(ColorLegend(color), render_group(view, tokens))


def _chosen(reader: LedgerReader, tokenizer: Any, asked: SamplesAsked) -> tuple[list[Sample], str]:
    """The trajectories, and in words how many there are."""
    if asked.text:
        result = look_for(
            reader, tokenizer, asked.text, asked.num, asked.before, asked.only, look_s=HISTORY_S
        )
        further = "" if result.before is None else f" --before {result.before} looks further back."
        return result.samples, f"{result.summary(asked.only)}{further}"
    samples = reader.samples(asked.choice, asked.num, asked.only)
    if asked.only == ANY:
        return samples, ""
    return samples, filtered_line(reader.num_samples(asked.choice, asked.only), len(samples))


def _samples(
    view: list[View], summary: str, tokens: Mapping[int, Sequence[ColoredTokens]], color: TokenColor
) -> Group:
    head = [Text(summary)] if summary else []
    legend = [ColorLegend(color)] if tokens else []
    none = [] if view else [Text("none" if summary else "none yet")]
    drawn = [render_sample(one, tokens.get(one["trajectory_id"], ())) for one in view]
    return Group(*head, *legend, *none, *drawn)
