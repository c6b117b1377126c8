"""Where a run is slow, as HTML: a stacked bar for each role, the bottleneck, and what a change would give."""

from __future__ import annotations

from html import escape

from millrace.look.drawing import fragments
from millrace.look.drawing.figures import WAITING, WEIGHTS, WORK
from millrace.look.speed.speed_answer import SpeedAnswer, fidelity, gains_of, headline
from millrace.observe.slow import time_use

COLORS = {
    time_use.COMPUTING: WORK,
    time_use.DECODING: WORK,
    time_use.SCORING: WORK,
    time_use.PUBLISHING: WEIGHTS,
    time_use.CHECKPOINT: WEIGHTS,
    time_use.WEIGHTS: WEIGHTS,
}
"""Of causes. All others are waiting. Causes of one colour have different shades in a bar."""
SHADES = (1.0, 0.55, 0.8, 0.35)
SHARE_MIN = 0.005
"""A smaller share has no words."""


def speed_section(answer: SpeedAnswer, address: str = "") -> str:
    """`address` of the page with what a change would give, if that is not computed yet; empty: no link."""
    bars = "".join(_bar(role, seconds) for role, seconds in answer.use.roles.items())
    slow = answer.bottleneck
    advice = f"<p>{fragments.quoted(slow.advice)}.</p>" if slow.advice else ""
    return (
        f"<h2>Where the run is slow</h2><p>{fragments.safe(headline(answer.use))}</p>"
        f"<article><h3>Bottleneck: {fragments.safe(slow.name)}</h3>"
        f"<p>{fragments.safe(slow.reason[:1].upper() + slow.reason[1:])}.</p>{advice}</article>"
        f'<p class="quiet">{_LEGEND}</p><div class="spent">{bars}</div>{_outlook(answer, address)}'
    )


def _bar(role: str, seconds: dict[str, float]) -> str:
    total = sum(seconds.values()) or 1.0
    parts, words, used = [], [], dict[str, int]()
    for cause, spent in seconds.items():
        color = COLORS.get(cause, WAITING)
        shade = SHADES[used.get(color, 0) % len(SHADES)]
        used[color] = used.get(color, 0) + 1
        share = spent / total
        look = f"background:{escape(color)};opacity:{shade}"
        name = fragments.safe(f"{cause}: {share:.1%}, {spent:,.1f} s")
        parts.append(f'<i style="width:{100 * share:.2f}%;{look}" title="{name}"></i>')
        if share >= SHARE_MIN:
            words.append(f'<span><i style="{look}"></i> {fragments.safe(f"{cause} {share:.0%}")}</span>')
    told = f'<p class="quiet">{" ".join(words)}</p>'
    return f"<b>{fragments.safe(role)}</b><div>{''.join(parts)}</div>{told}"


def _outlook(answer: SpeedAnswer, address: str) -> str:
    title = "<h2>What a change would give</h2>"
    if answer.why:
        return title + f'<p class="notice">It cannot be said: {fragments.quoted(answer.why)}</p>'
    if answer.outlook is None:
        link = fragments.link(address, "Simulate this run with one change after the other")
        return f"{title}<p>{link}: it takes some seconds.</p>" if address else ""
    rows = [
        (fragments.Raw(fragments.quoted(change)), fragments.Raw(fragments.safe(gain)))
        for change, gain in gains_of(answer.outlook)
    ]
    notes = "".join(f'<p class="quiet">{fragments.quoted(note)}.</p>' for note in answer.outlook.notes)
    table = fragments.table(("change", "speed"), rows) if rows else ""
    return f"{title}<p>{fragments.safe(fidelity(answer.outlook))}</p>{table}{notes}"


_LEGEND = (
    "Green is work, magenta is weights on their way, grey is waiting; shades tell causes apart. Of replicas "
    "and reward workers, seconds are counted for each of them."
)
