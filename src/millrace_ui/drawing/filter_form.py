"""The form that chooses trajectories of a list. A browser puts what it has into the address."""

from __future__ import annotations

from html import escape
from urllib.parse import urlencode

from millrace.core.types import State
from millrace.ledger.reading.samples import ANY, Choice, SampleFilter
from millrace_ui.drawing.fragments import safe

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
