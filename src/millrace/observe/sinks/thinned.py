"""Fewer reports for the event log: all of the first, then one each `REPORT_INTERVAL_S`, and always the
last."""

from __future__ import annotations

from millrace.core.events import Event, Sink

ALL_REPORTS = 2000
"""So many first reports of each replica are all kept: enough to calibrate the simulator."""
ALL_REPORTS_OF_RUN = 64 * ALL_REPORTS
"""As long as all replicas together have no more. Otherwise a fleet of thousands would log gigabytes."""
REPORT_INTERVAL_S = 10.0
"""Between two kept reports of a replica after the first `ALL_REPORTS`."""


class Thinned:
    """A sink that passes every event to `sink`, except some reports. Counters in reports are cumulative, and
    the last report of an incarnation is always kept. So that report has the sums of all reports."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._num_all = 0
        self._num_kept: dict[str, tuple[int, float]] = {}  # replica -> reports kept, when the last was kept
        self._skipped: dict[str, Event] = {}  # replica -> its newest report, if it was not kept

    def __call__(self, event: Event) -> None:
        if event.kind == "report":
            return self._report(event)
        if event.kind == "worker_died":
            self._flush(event.fields["name"])
        elif event.kind == "run_ended":
            for replica in list(self._skipped):
                self._flush(replica)
        self._sink(event)

    def _report(self, event: Event) -> None:
        replica = event.fields["replica"]
        count, kept_s = self._num_kept.get(replica, (0, event.time_s))
        keeps_all = count < ALL_REPORTS and self._num_all < ALL_REPORTS_OF_RUN
        if not keeps_all and count and event.time_s < kept_s + REPORT_INTERVAL_S:
            self._num_kept[replica], self._skipped[replica] = (count, kept_s), event
            return
        self._num_all += 1
        self._num_kept[replica] = count + 1, event.time_s
        self._skipped.pop(replica, None)
        self._sink(event)

    def _flush(self, replica: str) -> None:
        report = self._skipped.pop(replica, None)
        if report is not None:
            self._sink(report)
