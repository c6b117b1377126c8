"""A run as a card in a notebook: figures and the curve of rewards, without scripts."""

from __future__ import annotations

from millrace.core.errors import MillraceError
from millrace.observe.summary import ends_of
from millrace.run_directory.run_directory import RunDirectory
from millrace_ui.drawing import fragments
from millrace_ui.drawing.spark import spark
from millrace_ui.record.runs import run_line
from millrace_ui.record.steps import Steps

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
    reward = f"<div>{ends}</div>{spark(rewards, WIDTH, HEIGHT)}" if rewards else ""
    return f"<div><b>{name}</b> <div>{status}</div>{reward}<small><code>{path}</code></small></div>"
