"""Records as HTML. This module escapes all text of a run, a model or a reward."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any
from urllib.parse import quote, urlencode

from millrace.core.types import State
from millrace.diagnose.finding import Finding
from millrace.ledger.samples import ANY, Choice, SampleFilter
from millrace.observe.live.phrases import duration
from millrace.observe.shown_samples import turn_title, version_range
from millrace.observe.terminal import harmless
from millrace_ui.drawing.colours import LEVELS, TONES, VERSION_COLORS, TokenColor, level, tone
from millrace_ui.record.runs import written
from millrace_ui.record.story import WaitingEpisode
from millrace_ui.record.tokens import Shown, ShownTurn, TokenText

EXPLANATION = 150
"""The most characters of an explanation that is not folded."""
SHORT = 24
"""The most characters of a cell that stays on one line."""


def safe(text: str) -> str:
    """The text as HTML that shows it, with markup and control characters escaped."""
    return escape(harmless(text))


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], *, empty: str = "None.") -> str:
    """A table. Cells are escaped, except those that are `Raw`."""
    body = "".join("<tr>" + "".join(map(_data, map(_cell, row))) + "</tr>" for row in rows)
    if not body:
        return f'<p class="quiet">{safe(empty)}</p>'
    names = "".join(f"<th>{safe(name)}</th>" for name in head)
    return f'<div class="wide"><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>'


def _data(html: str) -> str:
    return f"<td{' class=short' * (len(html) <= SHORT)}>{html}</td>"


class Raw(str):
    """HTML that this package made. It is not escaped again."""


def link(address: str, text: str) -> Raw:
    return Raw(f'<a href="{escape(address)}">{safe(text)}</a>')


def run_link(base: str, name: str) -> Raw:
    return link(f"{base}run/{quote(name)}", name)


def facts(values: Mapping[str, Any], meanings: Mapping[str, str] | None = None) -> str:
    """Figures with their names below them. `meanings` of the names follow under the figures."""
    known = meanings or {}
    cells = (
        f'<div title="{safe(known.get(name, ""))}"><b>{_cell(value)}</b><span>{safe(name)}</span></div>'
        for name, value in values.items()
    )
    return f'<div class="facts">{"".join(cells)}</div>{terms(known)}'


def terms(meanings: Mapping[str, str]) -> str:
    """What figures mean, folded."""
    each = "".join(f"<dt>{safe(name)}</dt><dd>{safe(text)}</dd>" for name, text in meanings.items())
    folded = f'<details class="quiet"><summary>What the figures mean</summary><dl>{each}</dl></details>'
    return folded if each else ""


def explained(text: str) -> Raw:
    """An explanation. Of a long one only the first sentence is shown until one opens it."""
    first, end, rest = text.partition(". ")
    if len(text) <= EXPLANATION or not rest:
        return Raw(f"<p>{safe(text)}</p>" if text else "")
    return Raw(f'<details class="quiet"><summary>{safe(first + end)}</summary>{safe(rest)}</details>')


def card(heading: str, explanation: str, html: str, *, whole: bool = False) -> str:
    """A chart with its meaning, beside others. `whole`: in a row of its own."""
    wide = " whole" * whole
    return f'<section class="chart{wide}"><h2>{safe(heading)}</h2>{explained(explanation)}{html}</section>'


def quoted(text: str) -> str:
    """Text in backquotes becomes code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", safe(text))


def notice(text: str) -> str:
    return f'<p class="notice">{safe(text)}</p>'


def findings(faults: Sequence[Finding], withdrawn: Sequence[str]) -> str:
    """The doctor's findings, and its findings that no longer hold."""
    before = "".join(f'<p class="quiet">{quoted(line)}.</p>' for line in withdrawn)
    if not faults:
        return f'<p class="good">The doctor knows of no fault.</p>{before}'
    return before + "".join(
        f'<article class="finding"><h3>{safe(fault.fault)}</h3>'
        + "".join(f"<p>{quoted(line)}</p>" for line in fault.evidence)
        + "<ul>"
        + "".join(f"<li>{quoted(line)}</li>" for line in fault.advice)
        + "</ul></article>"
        for fault in faults
    )


def waiting(
    counts: Mapping[str, tuple[int, float]], shown: Sequence[WaitingEpisode], trajectories: str
) -> str:
    """Who episodes wait for, and the longest waits. `counts` has how many wait for each role, and the seconds
    of the longest. `trajectories` is the address of their page; empty: no links."""
    text = ", ".join(f"{num:,} for the {role} (longest {duration(s)})" for role, (num, s) in counts.items())
    rows = []
    for one in shown:
        name = str(one.trajectory_id)
        address = f"{trajectories}?trajectory={name}"
        number = link(address, name) if trajectories else name
        rows.append((number, one.role, duration(one.waited_s), one.turn, one.tokens))
    head = ("trajectory", "waits for", "time", "turn", "tokens")
    return f'<h2 id="episodes">Episodes</h2><p>They wait: {safe(text)}.</p>{table(head, rows)}'


def state(name: str) -> str:
    return f'<span class="state {safe(name)}">{safe(name)}</span>'


def configuration(values: Mapping[str, Any]) -> str:
    return table(("key", "value"), [(key, written(value)) for key, value in values.items()])


@dataclass(frozen=True, slots=True)
class TokenColors:
    """How tokens are shown. `field` names the buttons that choose another colour. `largest`: the size of the
    group's largest advantage; None: no advantage is shown."""

    chosen: TokenColor = TokenColor.LOGPROB
    field: str = "color"
    largest: float | None = None


PLAIN = TokenColors()


def samples(
    shown: Sequence[Shown],
    colors: TokenColors = PLAIN,
    *,
    groups: str = "",
    trajectories: str = "",
    beside: bool = False,
) -> str:
    """Prompts and completions. Buttons choose what colours a token, and a box shows the id of each token
    behind its text. `groups` and `trajectories` are addresses that end before an id; empty: no links.
    `beside`: completions alone, side by side."""
    if not shown:
        return '<p class="quiet">There is none.</p>'
    addresses = groups, trajectories
    each = "".join(sample(one, colors.largest, addresses=addresses, prompt=not beside) for one in shown)
    each = f'<div class="beside">{each}</div>' if beside else each
    return f'<section class="samples">{_buttons(colors)}{each}</section>'


def _buttons(colors: TokenColors) -> str:
    names = [one for one in TokenColor if one is not TokenColor.ADVANTAGE or colors.largest is not None]
    chosen = colors.chosen if colors.chosen in names else TokenColor.LOGPROB
    radio = f'<input type="radio" name="{safe(colors.field)}"'
    buttons = "".join(
        f'<label>{radio} value="{one}"{" checked" * (one is chosen)}>{one.words}</label>' for one in names
    )
    buttons += '<label><input type="checkbox" name="ids"> token ids</label>'
    likely = "".join(f'<i class="p{n}">&nbsp;</i>' for n in range(LEVELS + 1))
    tones = "".join(f'<i class="a{n}">&nbsp;</i>' for n in range(2 * TONES + 1))
    legend = f'<span class="only-logprob">likely {likely} unlikely</span>'
    legend += f'<span class="only-advantage">below 0 {tones} above 0</span>'
    return f"<fieldset><legend>Tokens coloured by</legend>{buttons} {legend}</fieldset>"


def sample(
    one: Shown, largest: float | None = None, *, addresses: tuple[str, str] = ("", ""), prompt: bool = True
) -> str:
    """One trajectory. The pointer over a token shows its log-prob, version and advantage."""
    reward = "no reward" if one.reward is None else f"reward {one.reward:.4g}"
    trained = f"trained into version {one.trained}" if one.trained is not None else one.state
    details = [trained, one.reason, *_advantages(one), f"{one.num_tokens} tokens"]
    cut = f"ended by the budget of {one.ended_by}" if one.ended_by else "cut by the budget"
    details += [cut * (one.finish == "length"), version_range(one.versions) if one.versions else ""]
    (groups, trajectories), group, name = (
        addresses,
        f"group {one.group_id}",
        f"trajectory {one.trajectory_id}",
    )
    title = link(f"{trajectories}{one.trajectory_id}", name) if trajectories else name
    cells = [safe(detail) for detail in details if detail]
    if prompt:
        cells += [link(f"{groups}{one.group_id}", group) if groups else group, safe(f"row {one.row_id}")]
    measured = [f"{safe(name)} {_cell(value)}" for name, value in one.metrics.items()] if prompt else []
    cells += [safe(one.replica)] * bool(one.replica) + measured
    left_out = f'<p class="quiet">and {one.tokens_left_out:,} more tokens</p>' if one.tokens_left_out else ""
    turns = "".join(_turn(turn, largest) for turn in one.turns)
    return (
        f'<article class="sample" id="t{one.trajectory_id}">'
        f"<h3>{safe(reward)} <small>{title}</small></h3>"
        f'<p class="quiet">{", ".join(cells)}</p>'
        + f'<pre class="prompt">{safe(one.prompt)}</pre>' * prompt
        + f"{turns or _tokens('completion', one.token_texts, largest)}{left_out}</article>"
    )


def _advantages(one: Shown) -> list[str]:
    if not one.advantages:
        return []
    values = ", ".join(f"{value:.3g}" for value in one.advantages)
    return [f"advantage {values}" if len(one.advantages) == 1 else f"advantages of its turns {values}"]


def _turn(shown: ShownTurn, largest: float | None) -> str:
    turn = shown.turn
    title = turn_title(
        turn=turn.number,
        role=turn.role,
        tokens=turn.stop - turn.start,
        versions=turn.versions,
        reward=turn.reward,
        after=turn.after,
        sequence=turn.sequence,
        causes=turn.causes,
    )
    style = "completion" if turn.versions else "prompt"
    return f'<p class="quiet">{safe(title)}</p>{_tokens(style, shown.token_texts, largest)}'


def _tokens(style: str, tokens: Sequence[TokenText], largest: float | None) -> str:
    return f'<pre class="{style}">{"".join(_token(token, largest) for token in tokens)}</pre>'


def _token(token: TokenText, largest: float | None) -> str:
    ids = " ".join(map(str, token.ids))
    if token.logprob is None or token.version is None:
        return f'<span title="observed" data-ids="{ids}">{safe(token.text)}</span>'
    title = f"{token.logprob:.3f} nats, version {token.version}"
    color = f"p{level(token.logprob)} v{token.version % VERSION_COLORS}"
    if token.advantage is not None and largest is not None:
        title += f", advantage {token.advantage:.3g}"
        color += f" a{tone(token.advantage, largest)}"
    return f'<i class="{color}" title="{title}" data-ids="{ids}">{safe(token.text)}</i>'


def _cell(value: Any) -> str:
    if isinstance(value, Raw):
        return value
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return safe(f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value))


def spark(values: Sequence[float], width: int, height: int) -> str:
    """A curve as SVG, its least value at the bottom. Empty: there is no value."""
    if not values:
        return ""
    low, high = min(values), max(values)
    across, up = width / max(1, len(values) - 1), (height - 4) / ((high - low) or 1.0)
    points = " ".join(f"{i * across:.1f},{height - 2 - (v - low) * up:.1f}" for i, v in enumerate(values))
    label = f"from {values[0]:.3g} to {values[-1]:.3g}"
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{label}"><polyline points="{points}" fill="none" stroke="#3a86d1" stroke-width="2"/>'
        "</svg>"
    )


NUMBERS = {"reward_min": "reward from", "reward_max": "to", "tokens_min": "tokens from", "tokens_max": "to"}


def filter_form(address: str, text: str, choice: Choice, only: SampleFilter, color: str) -> str:
    """Fields of text, order, state, reason, reward and length."""
    orders = [(one.value, one.value) for one in Choice if one is not Choice.FAILED]
    state = only.state or (State.FAILED.value if choice is Choice.FAILED else "")
    fields = [
        _input("text", text, "Text in prompt or completion"),
        _select("choice", "order", orders, choice.value),
        _select("state", "state", [("", "any"), *((one.value, one.value) for one in State)], state),
        _input("reason", only.reason, "Reason of its end", short="reason has"),
    ]
    for name, label in NUMBERS.items():
        value = getattr(only, name)
        shown = "" if value is None else str(value)
        step = "any" if name.startswith("reward") else "1"
        number = f'<input type="number" step="{step}" name="{name}" value="{escape(shown)}">'
        fields.append(f"<label>{label} {number}</label>")
    kept = f'<input type="hidden" name="color" value="{escape(color)}">'
    fields += [kept, "<button>Filter</button>"]
    return f'<form class="filter" action="{escape(address)}">{"".join(fields)}</form>'


def in_address(only: SampleFilter) -> str:
    """The filter as a part of an address, which begins with &; empty: it lets all through."""
    if only == ANY:
        return ""
    names = ("state", "reason", *NUMBERS)
    pairs = [(name, getattr(only, name)) for name in names if getattr(only, name) not in ("", None)]
    return "&" + urlencode(pairs, errors="replace")


def _input(name: str, value: str, what: str, short: str = "") -> str:
    return (
        f'<label>{short} <input name="{name}" value="{escape(value)}" aria-label="{safe(what)}" '
        f'placeholder="{"" if short else safe(what.lower())}" size="{20 if short else len(what)}"></label>'
    )


def _select(name: str, label: str, options: list[tuple[str, str]], chosen: str) -> str:
    each = "".join(
        f'<option value="{value}"{" selected" * (value == chosen)}>{safe(words)}</option>'
        for value, words in options
    )
    return f'<label>{label} <select name="{name}">{each}</select></label>'
