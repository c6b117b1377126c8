"""How each role spent its time: a stacked bar for each, as HTML."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from millrace_ui.drawing import fragments
from millrace_ui.drawing.figures import WAITING

SHADES = (1.0, 0.55, 0.8, 0.35)
SHARE_MIN = 0.005
"""A smaller share has no words."""


def time_bars(roles: Mapping[str, Mapping[str, float]], colors: Mapping[str, str]) -> str:
    """`roles`: of each the seconds of each cause. A cause without a colour is waiting. Causes of one colour
    have different shades in a bar."""
    bars = "".join(_bar(role, seconds, colors) for role, seconds in roles.items())
    return f'<div class="spent">{bars}</div>'


def _bar(role: str, seconds: Mapping[str, float], colors: Mapping[str, str]) -> str:
    total = sum(seconds.values()) or 1.0
    parts, words, used = [], [], dict[str, int]()
    for cause, spent in seconds.items():
        color = colors.get(cause, WAITING)
        shade = SHADES[used.get(color, 0) % len(SHADES)]
        used[color] = used.get(color, 0) + 1
        share = spent / total
        look = f"background:{escape(color)};opacity:{shade}"
        name = fragments.safe(f"{cause}: {share:.1%}, {spent:,.1f} s")
        parts.append(f'<i style="width:{100 * share:.2f}%;{look}" title="{name}"></i>')
        if share >= SHARE_MIN:
            words.append(f'<span><i style="{look}"></i> {fragments.safe(f"{cause} {share:.0%}")}</span>')
    legend = f'<p class="quiet">{" ".join(words)}</p>'
    return f"<b>{fragments.safe(role)}</b><div>{''.join(parts)}</div>{legend}"
