"""The form that chooses curves. A browser puts what it has into the address."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from millrace_ui.curves.choices import SMOOTH_MAX, Band
from millrace_ui.curves.curve_lines import CurveSet
from millrace_ui.drawing.fragments import link, safe
from millrace_ui.overview import AXES

BANDS = {Band.RANGE: "least to largest", Band.DEVIATION: "standard deviation"}


def curve_form(address: str, curves: CurveSet, groups: Sequence[str] | None = None) -> str:
    """`groups`: the keys by which runs can be grouped; None: the address has the name of the one run."""
    one = curves.choices
    runs = "".join(f'<input type="hidden" name="run" value="{escape(name)}">' for name in one.runs)
    fields = [
        _select("by", "Axis", [(by.value, label) for by, label in AXES.items()], one.by.value),
        f'<label title="0: none. 0.9: about the last ten steps">Smoothing '
        f"{_number('smooth', f'{one.smooth:g}' if one.smooth else '', 'any', f'{SMOOTH_MAX}')}</label>",
        f"<label>Steps from {_number('from', one.first)}</label><label>to {_number('to', one.last)}</label>",
        f'<label><input type="checkbox" name="log" value="1"{" checked" * one.log}> logarithmic</label>',
    ]
    if groups is not None:
        names = dict.fromkeys([*groups, *[one.group] * bool(one.group)])  # it may not differ among these runs
        options = [("", "nothing"), *((name, name) for name in names)]
        fields.append(_select("group", "Group by", options, one.group))
        if curves.grouped:
            fields.append(
                _select("band", "Band", [(b.value, text) for b, text in BANDS.items()], one.band.value)
            )
    return (
        f'<form class="curves" action="{escape(address)}">{runs}{_metrics(curves)}'
        f'<div class="choices">{"".join(fields)}<button>Draw</button> {_ranges(address, curves)}</div></form>'
    )


def _ranges(address: str, curves: CurveSet) -> str:
    """Links to ranges of versions."""
    newest = max(
        (steps.versions[-1] for runs in curves.members.values() for steps in runs if len(steps)), default=0
    )
    ranges = {
        "all steps": None,
        "newest half": newest - max(1, newest // 2) + 1,
        "newest tenth": newest - max(1, newest // 10) + 1,
    }
    links = (
        link(address + curves.choices.address(first=first, last=None), words)
        for words, first in ranges.items()
    )
    return f'<span class="quiet">{" ".join(links)}</span>'


def _metrics(curves: CurveSet) -> str:
    """A box for each metric, by the first word of its name, in the order in which they are offered."""
    every, drawn = curves.measured, set(curves.drawn)
    sections: dict[str, list[str]] = {}
    for name in every:
        sections.setdefault(name.partition("/")[0], []).append(name)
    boxes = "".join(
        f"<fieldset><legend>{safe(title)}</legend>{''.join(_boxes(names, drawn))}</fieldset>"
        for title, names in sections.items()
    )
    return (
        f'<details class="metrics"><summary>Metrics: {len(drawn)} of {len(every)}</summary>{boxes}</details>'
    )


def _boxes(names: Iterable[str], drawn: set[str]) -> Iterable[str]:
    return (
        f'<label><input type="checkbox" name="metric" value="{escape(name)}"{" checked" * (name in drawn)}> '
        f"{safe(name.partition('/')[2] or name)}</label>"
        for name in names
    )


def _number(name: str, value: object, step: str = "1", largest: str = "") -> str:
    shown = "" if value is None else escape(str(value))
    most = f' max="{largest}"' if largest else ""
    return f'<input type="number" name="{name}" min="0"{most} step="{step}" value="{shown}">'


def _select(name: str, label: str, options: Iterable[tuple[str, str]], chosen: str) -> str:
    each = "".join(
        f'<option value="{escape(value)}"{" selected" * (value == chosen)}>{safe(words)}</option>'
        for value, words in options
    )
    return f'<label>{label} <select name="{name}">{each}</select></label>'
