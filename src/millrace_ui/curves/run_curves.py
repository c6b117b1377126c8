"""The curves of a run in a notebook. They grow in place while the run trains. IPython is optional."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from math import inf

from millrace.core.errors import MillraceError
from millrace.run_directory.run_directory import RunDirectory
from millrace_ui.curves.cards import notes
from millrace_ui.curves.chart import chart
from millrace_ui.curves.choices import CurveChoices
from millrace_ui.curves.curve_set import CurveSet
from millrace_ui.drawing import fragments
from millrace_ui.overview import AXES
from millrace_ui.record.runs import run_line
from millrace_ui.record.steps import Steps

FIRST_MAX = 6
"""Charts in a notebook if no metric is named."""
GRID = "display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 300px), 1fr)); gap: .8rem"


class RunCurves:
    """Curves of a run, drawn where a notebook shows this object. They grow in place while the run trains."""

    def __init__(
        self,
        run: RunDirectory,
        metrics: Sequence[str],
        has_ended: Callable[[], bool],
        *,
        every_s: float,
        timeout_s: float | None,
    ) -> None:
        self._run, self._steps = run, Steps(run.metrics)
        self._choices = CurveChoices(metrics=tuple(metrics))
        self._has_ended = has_ended
        self._every_s, self._timeout_s = every_s, inf if timeout_s is None else timeout_s

    def __repr__(self) -> str:
        return f"<millrace.RunCurves of {self._run.path}: a notebook draws them>"

    def _repr_html_(self) -> str:
        return self._html(self._has_ended())

    def _ipython_display_(self) -> None:
        """Draw until the run ends. An interrupt ends the drawing alone. A terminal gets one line."""
        from IPython import get_ipython
        from IPython.display import display

        text = {"text/plain": repr(self)}
        if not hasattr(get_ipython(), "kernel"):
            display(text, raw=True)
            return
        handle = None
        try:
            for html in self._drawings():
                if handle is None:
                    handle = display(text | {"text/html": html}, raw=True, display_id=True)
                else:
                    handle.update(text | {"text/html": html}, raw=True)
        except KeyboardInterrupt:
            return

    def _drawings(self) -> Iterator[str]:
        """Waits for new steps. It yields HTML that differs from the HTML before, until the run has ended or
        the time is over."""
        until_s, before = time.monotonic() + self._timeout_s, ""
        while True:
            ended = self._has_ended()  # before reading, so that the last steps are drawn
            if (html := self._html(ended)) != before:
                yield html
            before, left_s = html, until_s - time.monotonic()
            if ended or left_s <= 0:
                return
            time.sleep(min(self._every_s, left_s))

    def _html(self, ended: bool) -> str:
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
