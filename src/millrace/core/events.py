"""Events: what happened, sent once to any number of sinks.

An event is a kind and plain fields. Sinks (a JSONL file, the live view, a trace digest) subscribe
and are called in the order of subscription; they return quickly and never raise for bad fields. A sink with
an attribute `kinds` gets events of these kinds only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec


class Event(msgspec.Struct, frozen=True):
    """One thing that happened at `time_s` (loop clock) and `wall_s` (since the epoch)."""

    kind: str
    time_s: float
    wall_s: float
    fields: dict[str, Any]


HEADER = frozenset({"kind", "time_s", "wall_s"})
"""Names that no field may have: a line of `events.jsonl` has these names beside the fields."""

Sink = Callable[[Event], None]


class Events:
    """A fan-out of events to sinks. `clock` and `wall` are injected: this object knows no time."""

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock, self._wall = clock, wall
        self._sinks: list[Sink] = []
        self._by_kind: dict[str, list[Sink]] = {}

    def subscribe(self, sink: Sink) -> None:
        self._sinks.append(sink)
        self._by_kind.clear()

    def emit(self, kind: str, **fields: Any) -> None:
        assert HEADER.isdisjoint(fields), f"{kind}: a field is named as one of {sorted(HEADER)}"
        event = Event(kind, self._clock(), self._wall(), fields)
        if (sinks := self._by_kind.get(kind)) is None:
            sinks = self._by_kind[kind] = [s for s in self._sinks if kind in getattr(s, "kinds", (kind,))]
        for sink in sinks:
            sink(event)
