"""The work of roles as bars of a timeline."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(slots=True)
class TimelineBar:
    """Work of a role from `start` to `end`, in minutes since the first event. Of that time `share` was work.
    `kind` is the kind of the event that reported the work."""

    row: str
    kind: str
    start: float
    end: float
    label: str
    share: float = 1.0


class Activity:
    """How busy replicas were, in quarters: the newest spans. Equal neighbours are joined."""

    def __init__(self, spans_max: int) -> None:
        self.spans: deque[TimelineBar] = deque(maxlen=spans_max)
        self._newest: dict[str, TimelineBar] = {}

    def add(self, replica: str, start: float, end: float, share: float) -> None:
        share = round(4 * share) / 4
        last = self._newest.get(replica)
        if last is not None and last.share == share and last.end == start:
            last.end = end
            return
        self._newest[replica] = TimelineBar(replica, "report", start, end, f"decodes {share:.0%}", share)
        self.spans.append(self._newest[replica])


def row_order(row: str) -> tuple[int, int, str]:
    """Sorts rows: the trainer, the relays, then replicas by number."""
    first = {"trainer": 0, "relay": 1, "controller": 2}.get(row.partition("-")[0], 3)
    digits = row.rpartition("-")[2]
    return first, int(digits) if digits.isdigit() else 0, row
