"""A run as a card in a notebook: figures and the curve of rewards, without scripts."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.core.errors import MillraceError
from millrace.look.drawing import fragments
from millrace.look.record.runs import run_line
from millrace.look.record.steps import Steps
from millrace.observe.summary import ends_of
from millrace.run_directory.run_directory import RunDirectory

POINTS, WIDTH, HEIGHT = 120, 360, 60


def card(run: RunDirectory) -> str:
    """HTML. Never raises: the card says what is wrong with the run."""
    try:
        line, steps = run_line(run.path.name, run), Steps(run.metrics)
        steps.update()
        rewards = steps.curve("reward/mean", points=POINTS).y
        first, last = ends_of(steps.column("reward/mean"))
    except (MillraceError, OSError) as error:
        return fragments.notice(str(error))
    status = line.trouble or f"{line.state}, {line.version} of {line.steps} steps, schedule {line.schedule}"
    name, status, path = (fragments.safe(text) for text in (line.name, status, str(run.path)))
    ends = f"reward, first and last tenth: {first:.3g} → {last:.3g}"
    reward = f"<div>{ends}</div>{spark(rewards)}" if rewards else ""
    return f"<div><b>{name}</b> <div>{status}</div>{reward}<small><code>{path}</code></small></div>"


def spark(values: Sequence[float]) -> str:
    """A curve as SVG, its least value at the bottom."""
    low, high = min(values), max(values)
    across, up = WIDTH / max(1, len(values) - 1), (HEIGHT - 4) / ((high - low) or 1.0)
    points = " ".join(f"{i * across:.1f},{HEIGHT - 2 - (v - low) * up:.1f}" for i, v in enumerate(values))
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">'
        f'<polyline points="{points}" fill="none" stroke="#3a86d1" stroke-width="2"/></svg>'
    )
