"""Trajectories and groups for `millrace show`, read and filtered as on the pages of `millrace ui`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from colorsys import hls_to_rgb
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from rich.color import Color
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.style import Style
from rich.text import Text

from millrace.ledger.reading import LedgerReader
from millrace.ledger.samples import ANY, Choice, Sample, SampleFilter
from millrace.observe.shown_samples import render_group, render_sample
from millrace.observe.terminal import harmless
from millrace.run_directory.run_directory import RunDirectory
from millrace.run_directory.views import View, tokenizer_of
from millrace_ui.drawing.colours import (
    LEVELS,
    NATS_PER_LEVEL,
    TONES,
    VERSION_COLORS,
    TokenColor,
    level,
    tone,
)
from millrace_ui.record.groups import HISTORY_S, MEMBERS_MAX, group_view, shown_members
from millrace_ui.record.tokens import Shown, TokenText, advantages_of, filtered_line, look_for, shown_of
from millrace_ui.record.views import samples_view

RGB = tuple[int, int, int]
_UNLIKELY, _BELOW, _ABOVE = (224, 138, 0), (214, 106, 20), (30, 120, 230)
_HUES = 213, 273, 333, 33, 93, 153


def has_colors(console: Console) -> bool:
    """False: a file, a pipe, fewer than 256 colours (too few for the shades), or `NO_COLOR` is set."""
    return console.color_system in ("256", "truecolor") and not console.no_color


@dataclass(frozen=True, slots=True)
class ColoredTokens:
    """Tokens of one passage, and how many more the passage has. `largest`: as of `TokenColors`."""

    tokens: Sequence[TokenText]
    color: TokenColor
    largest: float | None
    left_out: int = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = Text()
        if has_colors(console):
            for token in self.tokens:
                text.append(harmless(token.text), self._style(token))
        else:
            for _, run in groupby(self.tokens, self._shade):
                text.append(self._marked(list(run)))
        if self.left_out:
            text.append(f"\n[... {self.left_out:,} more tokens ...]")
        yield text

    def _shade(self, token: TokenText) -> int | float | None:
        """Neighbours of one shade share a mark. None: no colour, as of a token that an environment wrote."""
        if token.logprob is None or token.version is None:
            return None
        match self.color:
            case TokenColor.LOGPROB:
                return level(token.logprob) or None
            case TokenColor.VERSION:
                return token.version
        return None if self.largest is None else token.advantage

    def _style(self, token: TokenText) -> Style:
        shade = self._shade(token)
        if shade is None:
            return Style.null()
        match self.color:
            case TokenColor.LOGPROB:
                return shade_style(self.color, int(shade))
            case TokenColor.VERSION:
                return shade_style(self.color, int(shade) % VERSION_COLORS)
        return shade_style(self.color, tone(shade, self.largest or 0.0))

    def _marked(self, tokens: Sequence[TokenText]) -> str:
        words = "".join(harmless(token.text) for token in tokens)
        shade = self._shade(tokens[0])
        if shade is None:
            return words
        match self.color:
            case TokenColor.LOGPROB:
                mark = f"{min(token.logprob or 0.0 for token in tokens):.1f}"
            case TokenColor.VERSION:
                mark = f"v{shade}"
            case _:
                mark = f"{shade:+.3g}"
        return f"«{mark}:{words}»"


def shade_style(color: TokenColor, shade: int) -> Style:
    """`shade`: a level, a version modulo `VERSION_COLORS`, or a tone."""
    match color:
        case TokenColor.LOGPROB:
            rgb = _tinted(_UNLIKELY, shade / LEVELS)
        case TokenColor.VERSION:
            rgb = _of_hue(_HUES[shade])
        case _:
            rgb = _tinted(_ABOVE if shade > TONES else _BELOW, abs(shade - TONES) / TONES)
            if shade == TONES:
                return Style.null()
    return Style(color="black", bgcolor=Color.from_rgb(*rgb))


def _tinted(rgb: RGB, share: float) -> RGB:
    """From a pale tint of a colour to the colour, on which black text can be read."""
    red, green, blue = (round(255 - (255 - part) * (0.2 + 0.6 * share)) for part in rgb)
    return red, green, blue


def _of_hue(hue: int) -> RGB:
    red, green, blue = (round(255 * part) for part in hls_to_rgb(hue / 360, 0.75, 0.7))
    return red, green, blue


def colored_passages(shown: Shown, color: TokenColor, largest: float | None = None) -> list[ColoredTokens]:
    """The passages of `observe.shown_samples.passages_of`, as far as `shown` has them."""
    parts = [turn.token_texts for turn in shown.turns] or [shown.token_texts]
    left_out = [0] * (len(parts) - 1) + [shown.tokens_left_out]
    pairs = zip(parts, left_out, strict=True)
    return [ColoredTokens(tokens, color, largest, num) for tokens, num in pairs]


class ColorLegend:
    """What the colours or marks of `color` say, in a line."""

    def __init__(self, color: TokenColor) -> None:
        self._color = color

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        match self._color:
            case TokenColor.LOGPROB:
                shades, what = range(1, LEVELS + 1), f"each shade {NATS_PER_LEVEL} nats less likely"
                mark = f"«least log-prob:tokens», where it is -{NATS_PER_LEVEL} or less"
            case TokenColor.VERSION:
                shades, what, mark = range(VERSION_COLORS), "they come again", "«version:tokens»"
            case _:
                shades, what = range(2 * TONES + 1), "below 0 to above 0"
                mark = "«advantage:tokens»"
        if not has_colors(console):
            yield Text(f"tokens marked by {self._color.words}: {mark}")
            return
        text = Text(f"tokens coloured by {self._color.words}: ")
        for shade in shades:
            text.append("  ", shade_style(self._color, shade))
        yield text.append(f" ({what})")


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
