"""A long run does not keep every report, and loses no sum."""

from __future__ import annotations

import pytest

from millrace.core.events import Event
from millrace.observe.sinks import jsonl
from millrace.observe.sinks.jsonl import ALL_REPORTS, REPORT_INTERVAL_S, Thinned


def report(time_s: float, tokens: int) -> Event:
    return Event("report", time_s, 0.0, {"replica": "replica-0", "generated_tokens": tokens})


def test_after_the_first_reports_one_is_kept_now_and_then_and_the_last_before_a_death():
    kept: list[Event] = []
    sink = Thinned(kept.append)
    for i in range(ALL_REPORTS):
        sink(report(0.0, i))
    assert len(kept) == ALL_REPORTS
    for i in range(100):
        sink(report(1.0 + i / 4, ALL_REPORTS + i))
    assert [event.time_s for event in kept[ALL_REPORTS:]] == [REPORT_INTERVAL_S, 2 * REPORT_INTERVAL_S]
    died = Event("worker_died", 99.0, 0.0, {"name": "replica-0"})
    sink(died)
    assert kept[-2].fields["generated_tokens"] == ALL_REPORTS + 99 and kept[-1] is died
    sink(Event("run_ended", 100.0, 0.0, {}))
    assert kept[-1].kind == "run_ended" and kept[-2] is died


def test_a_fleet_of_thousands_keeps_few_reports_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "ALL_REPORTS_OF_RUN", 6)
    kept = list[Event]()
    sink = Thinned(kept.append)
    for replica in range(10):
        for i in range(3):
            sink(Event("report", float(i), 0.0, {"replica": f"replica-{replica}"}))
    assert len(kept) == 3 + 3 + 8
