"""Records as HTML. Everything that a run, a model or a reward wrote is escaped here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from millrace.look.record.runs import RunLine
from millrace.look.record.tokens import Shown, TokenText
from millrace.observe.doctor.finding import Finding
from millrace.observe.terminal import harmless
from millrace.run_directory.resume import ABSENT, Change

LEVELS, NATS_PER_LEVEL = 8, 0.5
"""Shades of a token by its log-prob: the last one is for all below."""
VERSION_COLORS = 6
SHORT = 24
"""Characters of a cell that stays on one line."""


def safe(text: str) -> str:
    """As HTML that shows what is written, and obeys nothing of it."""
    return escape(harmless(text))


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], *, empty: str = "None.") -> str:
    """Cells are escaped, but for those that are `Raw`."""
    body = "".join("<tr>" + "".join(map(_data, map(_cell, row))) + "</tr>" for row in rows)
    if not body:
        return f'<p class="quiet">{safe(empty)}</p>'
    names = "".join(f"<th>{safe(name)}</th>" for name in head)
    return f'<div class="wide"><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>'


def _data(html: str) -> str:
    return f"<td{' class=short' * (len(html) <= SHORT)}>{html}</td>"


class Raw(str):
    """HTML made here."""


def link(address: str, text: str) -> Raw:
    return Raw(f'<a href="{escape(address)}">{safe(text)}</a>')


def run_link(base: str, name: str) -> Raw:
    return link(f"{base}run/{quote(name)}", name)


def facts(values: Mapping[str, Any], meanings: Mapping[str, str] | None = None) -> str:
    """Figures with their names below them, and under all of them what the names mean."""
    cells = (f"<div><b>{_cell(value)}</b><span>{safe(name)}</span></div>" for name, value in values.items())
    told = "".join(f"<dt>{safe(name)}</dt><dd>{safe(text)}</dd>" for name, text in (meanings or {}).items())
    legend = f'<details class="quiet"><summary>What the figures mean</summary><dl>{told}</dl></details>'
    return f'<div class="facts">{"".join(cells)}</div>{legend if told else ""}'


def quoted(text: str) -> str:
    """With what stands between backquotes as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", safe(text))


def notice(text: str) -> str:
    return f'<p class="notice">{safe(text)}</p>'


def findings(found: Sequence[Finding], withdrawn: Sequence[str]) -> str:
    """What the doctor says, and what it said before."""
    past = "".join(f'<p class="quiet">{safe(line)}.</p>' for line in withdrawn)
    if not found:
        return f'<p class="good">The doctor knows of no fault.</p>{past}'
    return past + "".join(
        f'<article class="finding"><h3>{safe(one.fault)}</h3>'
        + "".join(f"<p>{safe(line)}</p>" for line in one.evidence)
        + "<ul>"
        + "".join(f"<li>{safe(line)}</li>" for line in one.advice)
        + "</ul></article>"
        for one in found
    )


def runs(base: str, lines: Sequence[RunLine]) -> str:
    """The list of runs, each with a box that chooses it for a comparison."""
    rows = [
        (
            Raw(f'<input type="checkbox" name="run" value="{escape(line.name)}" aria-label="compare">'),
            run_link(base, line.name),
            line.trouble or Raw(state(line.state)),
            f"{line.version} of {line.steps}",
            line.reward,
            line.schedule,
        )
        for line in lines
    ]
    head = ("", "run", "state", "step", "reward", "schedule")
    button = "<button>Compare the chosen ones</button>"
    return f'<form action="{escape(base)}compare">{button}{table(head, rows)}</form>'


def swatch(color: str, name: str) -> str:
    return f'<span><i style="background: {color}"></i> {safe(name)}</span>'


def state(name: str) -> str:
    return f'<span class="state {safe(name)}">{safe(name)}</span>'


def configuration(values: Mapping[str, Any]) -> str:
    return table(("key", "value"), [(key, _written(value)) for key, value in values.items()])


def differences(changes: Sequence[Change], names: tuple[str, str]) -> str:
    rows = [(change.key, _written(change.old), _written(change.new)) for change in changes]
    return table(("key", *names), rows, empty="Their configurations are equal.")


def samples(shown: Sequence[Shown], *, group: str = "color") -> str:
    """Prompts and completions, with a choice of what colours a token. `group` names the choice."""
    if not shown:
        return '<p class="quiet">There is none.</p>'
    radio = f'<input type="radio" name="{safe(group)}"'
    choices = "".join(
        f'<label>{radio} value="{value}"{" checked" * (value == "logprob")}>{words}</label>'
        for value, words in (("logprob", "log-prob"), ("version", "version"), ("none", "nothing"))
    )
    legend = (
        '<span class="only-logprob">likely '
        + "".join(f'<i class="p{level}">&nbsp;</i>' for level in range(LEVELS + 1))
        + " unlikely</span>"
    )
    return (
        f'<section class="samples"><fieldset><legend>Tokens coloured by</legend>{choices} {legend}</fieldset>'
        + "".join(map(sample, shown))
        + "</section>"
    )


def sample(one: Shown) -> str:
    """One trajectory. A token tells of itself under the pointer."""
    reward = "no reward" if one.reward is None else f"reward {one.reward:.4g}"
    trained = f"trained into version {one.trained}" if one.trained is not None else one.state
    measured = [f"{name} {_cell(value)}" for name, value in one.metrics.items()]
    told = [trained, one.reason, f"{one.num_tokens} tokens", "cut by the budget" * (one.finish == "length")]
    told += [f"group {one.group_id}", f"row {one.row_id}", one.replica, *measured]
    left_out = f'<p class="quiet">and {one.tokens_left_out:,} more tokens</p>' if one.tokens_left_out else ""
    return (
        f'<article class="sample"><h3>{safe(reward)} <small>trajectory {one.trajectory_id}</small></h3>'
        f'<p class="quiet">{safe(", ".join(part for part in told if part))}</p>'
        f'<pre class="prompt">{safe(one.prompt)}</pre>'
        f'<pre class="completion">{"".join(map(_token, one.pieces))}</pre>{left_out}</article>'
    )


def _token(piece: TokenText) -> str:
    level = int(max(0, min(LEVELS, -piece.logprob / NATS_PER_LEVEL)))  # the last one for NaN too
    title = f"{piece.logprob:.3f} nats, version {piece.version}"
    color = f"p{level} v{piece.version % VERSION_COLORS}"
    return f'<i class="{color}" title="{title}">{safe(piece.text)}</i>'


def _written(value: Any) -> str:
    """As in a configuration file."""
    if isinstance(value, bool):
        return str(value).lower()
    return "not there" if value is ABSENT else "none" if value is None else str(value)


def _cell(value: Any) -> str:
    if isinstance(value, Raw):
        return value
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return safe(f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value))
