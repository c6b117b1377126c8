"""Tokens in a terminal, in the colours of the pages. Where there are no colours, marks take their place."""

from __future__ import annotations

from collections.abc import Sequence
from colorsys import hls_to_rgb
from dataclasses import dataclass
from itertools import groupby

from rich.color import Color
from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.text import Text

from millrace.observe.terminal import harmless
from millrace_ui.drawing.shades import (
    LEVELS,
    NATS_PER_LEVEL,
    TONES,
    VERSION_COLORS,
    TokenColor,
    level,
    tone,
)
from millrace_ui.record.tokens import Shown, TokenText

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
    """The passages of `observe.samples.passages_of`, as far as `shown` has them."""
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
