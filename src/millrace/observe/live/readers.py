"""A run outlives those who read what it prints: `millrace train ... | head`."""

from __future__ import annotations

from typing import Any

from millrace.core.events import Event, Events


class LostReaders:
    """A sink. Tells once, as a `warned` event, that one of `outlets` has lost its reader: see `Terminal` and
    `StructuredLog`, which then drop what follows."""

    def __init__(self, events: Events, outlets: list[Any]) -> None:
        self._events, self._outlets, self._told = events, outlets, False

    def __call__(self, _: Event) -> None:
        if self._told or not any(getattr(outlet, "reader_gone", False) for outlet in self._outlets):
            return
        self._told = True
        self._events.emit(
            "warned",
            source="output",
            reason="nobody reads it any more: what would be printed is dropped, and the run goes on",
        )
