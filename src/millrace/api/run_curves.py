"""The curves of a run in a notebook. They grow in place while the run trains. IPython is optional."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Protocol

from millrace.core.wings import wing
from millrace.run_directory.run_directory import RunDirectory


class Drawing(Protocol):
    """The run's curves as HTML, with all steps so far. `ended`: the run was over before this call."""

    def __call__(self, *, ended: bool) -> str: ...


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
        self._path = run.path
        self._draw: Drawing = wing("ui.drawing")(run, metrics)
        self._has_ended = has_ended
        self._every_s, self._timeout_s = every_s, inf if timeout_s is None else timeout_s

    def __repr__(self) -> str:
        return f"<millrace.RunCurves of {self._path}: a notebook draws them>"

    def _repr_html_(self) -> str:
        return self._draw(ended=self._has_ended())

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
            if (html := self._draw(ended=ended)) != before:
                yield html
            before, left_s = html, until_s - time.monotonic()
            if ended or left_s <= 0:
                return
            time.sleep(min(self._every_s, left_s))
