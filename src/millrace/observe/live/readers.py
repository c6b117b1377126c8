"""A run goes on when the reader of its output has gone: `millrace train ... | head`."""

from __future__ import annotations

from typing import Any

from millrace.core.events import Event, Events


class LostReaders:
    """A sink. Reports once, as a `warned` event, that one of `outlets` has lost its reader. `Terminal` and
    `StructuredLog` then drop their output."""

    def __init__(self, events: Events, outlets: list[Any]) -> None:
        self._events, self._outlets, self._warned = events, outlets, False

    def __call__(self, _: Event) -> None:
        if self._warned or not any(getattr(outlet, "reader_gone", False) for outlet in self._outlets):
            return
        self._warned = True
        self._events.emit(
            "warned",
            source="output",
            reason="nobody reads it any more: what would be printed is dropped, and the run goes on",
        )
