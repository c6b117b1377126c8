"""Fewer reports for the record: all of the first, then one now and then, and always the last."""

from __future__ import annotations

from millrace.core.events import Event, Sink

ALL_REPORTS = 2000
"""Of each replica, kept one by one: enough to calibrate the simulator from."""
REPORT_INTERVAL_S = 10.0
"""Between two kept reports of a replica after those."""


class Thinned:
    """A sink that hands everything on to `sink`, but for reports in between. Counters in reports are
    cumulative: the last report of an incarnation, which is always kept, has the sums of all before it."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._told: dict[str, tuple[int, float]] = {}  # replica -> reports so far, when the last was kept
        self._held: dict[str, Event] = {}  # replica -> its newest report, if that was not kept

    def __call__(self, event: Event) -> None:
        if event.kind == "report":
            return self._report(event)
        if event.kind == "worker_died":
            self._tell(event.fields["name"])
        elif event.kind == "run_ended":
            for replica in list(self._held):
                self._tell(replica)
        self._sink(event)

    def _report(self, event: Event) -> None:
        replica = event.fields["replica"]
        count, kept_s = self._told.get(replica, (0, event.time_s))
        if count >= ALL_REPORTS and event.time_s < kept_s + REPORT_INTERVAL_S:
            self._told[replica], self._held[replica] = (count, kept_s), event
            return
        self._told[replica] = count + 1, event.time_s
        self._held.pop(replica, None)
        self._sink(event)

    def _tell(self, replica: str) -> None:
        held = self._held.pop(replica, None)
        if held is not None:
            self._sink(held)
