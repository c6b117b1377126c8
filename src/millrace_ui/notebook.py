"""A run in a notebook: HTML without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch

from millrace.api.plain_records import RunComparison
from millrace.core.errors import MillraceError
from millrace.diagnose.examine import Diagnosis
from millrace.observe.summary import ends_of
from millrace.run_directory.run_directory import RunDirectory
from millrace_ui import side_by_side
from millrace_ui.curves.cards import notes
from millrace_ui.curves.chart import chart
from millrace_ui.curves.choices import CurveChoices
from millrace_ui.curves.curve_lines import CurveSet
from millrace_ui.drawing import fragments
from millrace_ui.drawing.fragments import spark
from millrace_ui.overview import AXES
from millrace_ui.record.runs import run_line
from millrace_ui.record.steps import Steps

POINTS, WIDTH, HEIGHT = 120, 360, 60
"""Of a card's curve."""
FIRST_MAX = 6
"""Charts in a notebook if no metric is named."""
GRID = "display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 300px), 1fr)); gap: .8rem"


@singledispatch
def html(shown: object) -> str:
    """A run's card, a diagnosis or a comparison as HTML."""
    raise TypeError(f"a notebook cannot show {type(shown).__name__}")


@html.register
def _diagnosis(shown: Diagnosis) -> str:
    slow = f"<p>Bottleneck: {fragments.quoted(str(shown.bottleneck))}</p>"
    return fragments.findings(shown.findings, shown.withdrawn) + slow


@html.register
def _comparison(shown: RunComparison) -> str:
    return side_by_side.html(shown)


@html.register
def card(run: RunDirectory) -> str:
    """Figures and the curve of rewards. Never raises: the card says what is wrong with the run."""
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


class GrowingCurves:
    """The curves of a run, which each call draws again with the new steps. `metrics`: which, or the first."""

    def __init__(self, run: RunDirectory, metrics: Sequence[str]) -> None:
        self._run, self._steps = run, Steps(run.metrics)
        self._choices = CurveChoices(metrics=tuple(metrics))

    def __call__(self, *, ended: bool) -> str:
        """Never raises: the text says what is wrong with the run."""
        line = run_line(self._run.path.name, self._run)
        try:
            self._steps.update()
        except (MillraceError, OSError) as error:
            return fragments.notice(str(error))
        state = line.trouble or f"{line.state if ended else 'running'}, {line.version} of {line.steps} steps"
        head = f"<div><b>{fragments.safe(line.name)}</b> {fragments.safe(state)}</div>"
        return head + (self._charts() if len(self._steps) else "<div>No optimizer step is done yet.</div>")

    def _charts(self) -> str:
        curves = CurveSet({self._run.path.name: [self._steps]}, self._choices)
        across, x_label = curves.across(), AXES[curves.choices.by]
        assert across is not None, "there is a step"
        names = curves.drawn if self._choices.metrics else curves.drawn[:FIRST_MAX]
        drawn = [chart(name, curves.lines(name), across, x_label=x_label, alone=True) for name in names]
        return f'{notes(curves)}<div style="{GRID}">{"".join(drawn)}</div>'
