"""A group as HTML: the prompt and its row, the attempts side by side, and how the row went over the run."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

from millrace.ledger.samples import Draw
from millrace_ui.drawing import fragments
from millrace_ui.drawing.colours import TokenColor
from millrace_ui.drawing.fragments import Raw, safe, spark
from millrace_ui.record.groups import RowHistory, ShownGroup, TaskRow
from millrace_ui.record.tokens import GroupAdvantages, Shown

METRICS_MAX = 12
"""The most columns of own metrics in the table of a group. The others are counted."""
CURVE_WIDTH, CURVE_HEIGHT = 416, 51
COLUMNS_MAX = 40


def group_page(group: ShownGroup, row: TaskRow, color: TokenColor, *, groups: str, trajectories: str) -> str:
    """`groups` and `trajectories` are addresses that end before an id."""
    colors = fragments.TokenColors(color, largest=known_largest(group.advantages))
    return (
        f"<h2>Group {group.group_id}</h2>{_facts(group)}"
        f'<h2>Prompt</h2><pre class="prompt">{safe(group.prompt)}</pre>{row_columns(row)}'
        f"<h2>Attempts</h2>{_attempts(group, trajectories)}{about(group)}"
        f"{fragments.samples(group.members, colors, trajectories=trajectories, beside=True)}"
        f"{history(group.history, group.group_id, groups) if group.history else ''}"
    )


def known_largest(advantages: GroupAdvantages) -> float | None:
    """None: the choice to colour by advantage makes no sense."""
    return advantages.largest if advantages.by_token else None


def about(group: ShownGroup) -> str:
    """What is not known of the group, in words."""
    lines = [line for line in (group.advantages.unknown, group.ratios) if line]
    return "".join(f'<p class="quiet">{safe(line)}</p>' for line in lines)


def row_columns(row: TaskRow) -> str:
    """The reference answer, and the other columns of the row."""
    if row.unknown:
        return f'<p class="quiet">{safe(row.unknown)}</p>'
    html = '<p class="quiet">The task has no reference answer.</p>'
    if (answer := row.answer) is not None:
        html = f'<p><span class="quiet">Reference answer</span></p><pre class="prompt">{safe(answer)}</pre>'
    if not row.columns:
        return html
    shown = list(row.columns.items())[:COLUMNS_MAX]
    rest = len(row.columns) - len(shown)
    more = f'<p class="quiet">and {rest} more columns</p>' if rest else ""
    names = f"Other columns of the row ({len(row.columns)})"
    table = fragments.table(("column", "value"), shown)
    return f"{html}<details><summary>{names}</summary>{table}{more}</details>"


def history(row_history: RowHistory, current: int, groups: str) -> str:
    """Each draw of the row, with a line of the mean rewards."""
    rows = [_draw(draw, current, groups) for draw in row_history.draws]
    head = ("group", "trained into", "sampled by", "mean reward", "mean tokens", "longest", "states")
    cut = ""
    if row_history.first:
        address = f"{groups}{current}&before={row_history.first}"
        link = fragments.link(address, "Look further back")
        cut = f'<p class="quiet">Only groups from {row_history.first:,} on were looked at. {link}</p>'
    line = _curve(row_history.rewards) if len(row_history.rewards) > 1 else ""
    times = "once" if len(row_history.draws) == 1 else f"{len(row_history.draws)} times"
    title = "The row over the run" + (f": drawn {times}" if row_history.whole else "")
    name = f'<p class="quiet">Row {safe(row_history.row_id)}</p>'
    return f"<h2>{title}</h2>{name}{line}{fragments.table(head, rows)}{cut}"


def _curve(values: Sequence[float]) -> str:
    """Its lowest and highest value are in words."""
    words = f"mean reward, the oldest first: lowest {min(values):.3g}, highest {max(values):.3g}"
    return f'{spark(values, CURVE_WIDTH, CURVE_HEIGHT)}<p class="quiet">{words}</p>'


def _facts(group: ShownGroup) -> str:
    rewards = [one.reward for one in group.members if one.reward is not None]
    trained = sorted({one.trained for one in group.members if one.trained is not None})
    lengths = [one.num_tokens for one in group.members]
    return fragments.facts(
        {
            "row": group.row_id,
            "trained into version": ", ".join(map(str, trained)) or None,
            "trajectories": ", ".join(f"{num} {state}" for state, num in group.states.items()),
            "mean reward": fmean(rewards) if rewards else None,
            "deviation of the rewards": pstdev(rewards) if rewards else None,
            "mean tokens": fmean(lengths) if lengths else None,
        }
    )


def _attempts(group: ShownGroup, trajectories: str) -> str:
    names = list(dict.fromkeys(name for one in group.members for name in one.metrics))
    shown = names[:METRICS_MAX]
    head = ("trajectory", "reward", "advantage", "tokens", "ended by", "state", "versions", *shown)
    rows = [_attempt(one, group.advantages, shown, trajectories) for one in group.members]
    cut = [f"The first {len(group.members)} of {group.num_members} trajectories are shown."] * (
        len(group.members) < group.num_members
    )
    cut += [f"Of {len(names)} metrics, {len(shown)} are shown."] * (len(shown) < len(names))
    return fragments.table(head, rows) + "".join(f'<p class="quiet">{safe(line)}</p>' for line in cut)


def _attempt(one: Shown, advantages: GroupAdvantages, names: Sequence[str], trajectories: str) -> list[Any]:
    return [
        fragments.link(f"{trajectories}{one.trajectory_id}", str(one.trajectory_id)),
        one.reward,
        advantage_cell(one, advantages),
        one.num_tokens,
        one.finish or None,
        f"{one.state}: {one.reason}" if one.reason else one.state,
        _range(one.versions),
        *(one.metrics.get(name) for name in names),
    ]


def advantage_cell(one: Shown, advantages: GroupAdvantages) -> Any:
    if one.trajectory_id in advantages.masked:
        return "not trained"
    values = [f"{value:.3g}" for value in one.advantages]
    return ", ".join(values) or None


def _draw(draw: Draw, current: int, groups: str) -> list[Any]:
    number = str(draw.group_id)
    if draw.skipped:
        return [number, None, None, None, None, None, f"skipped: {draw.skipped}"]
    name = (
        Raw(f"<b>{number}</b>") if draw.group_id == current else fragments.link(f"{groups}{number}", number)
    )
    states = ", ".join(f"{num} {state}" for state, num in draw.states)
    trained = ", ".join(map(str, draw.trained)) or None
    sampled = _range(draw.sampled or ())
    return [name, trained, sampled, draw.reward_mean, draw.tokens_mean, draw.tokens_max, states]


def _range(versions: Sequence[int]) -> str | None:
    if not versions:
        return None
    first, last = min(versions), max(versions)
    return str(first) if first == last else f"{first} to {last}"
