"""The events of a run as lines of JSON on a stream, for a collector of logs."""

from __future__ import annotations

import io
from typing import TextIO

from millrace.core.events import Event
from millrace.observe.live.live_view import plain_line
from millrace.observe.live.status import Status
from millrace.observe.sinks.jsonl import encoded
from millrace.observe.terminal import drop_output, reader_has_gone

LEFT_OUT = frozenset({"admitted", "leased", "report", "finished", "observed", "scored", "ended"})
"""Kinds that come for every trajectory, or many times a second: `events.jsonl` has them."""

_LEVELS = {
    **dict.fromkeys(("worker_died", "step_rejected", "replay_differs", "stage_missed"), "warning"),
    **dict.fromkeys(("stalled", "quarantined", "warned", "finding"), "warning"),
}


class StructuredLog:
    """A sink. Each line has `level` (info, warning, error), `wall_s` (since the epoch), `kind`, `text` (the
    run in one line, for people) and `fields` (of the event). When nobody reads the stream any more, later
    lines are dropped, and `reader_gone` is true."""

    def __init__(self, stream: TextIO) -> None:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8")  # JSON is UTF-8 in every locale
        self._stream, self._status = stream, Status()
        self.reader_gone = False

    def __call__(self, event: Event) -> None:
        self._status(event)
        if event.kind in LEFT_OUT:
            return
        line = {
            "level": _level(event),
            "wall_s": event.wall_s,
            "kind": event.kind,
            "text": plain_line(self._status),
            "fields": event.fields,
        }
        try:
            self._stream.write(encoded(line).decode() + "\n")
            self._stream.flush()
        except OSError as error:
            if not reader_has_gone(error):
                raise
            self.reader_gone = True
            drop_output(self._stream)


def _level(event: Event) -> str:
    if event.kind == "run_ended" and not event.fields["ok"]:
        return "error"
    return _LEVELS.get(event.kind, "info")
