"""A trace shows durations as spans on the row of who spent them."""

from __future__ import annotations

import json

import pytest
from observe_events import moved, published, pulled, report, run_started, step, worker_died, worker_started

from millrace.observe.trace import chrome_trace


def test_spans_end_when_their_event_was_told() -> None:
    trace = chrome_trace([run_started(0.0), step(3.0, 1, step_s=2.0)])
    (span,) = [record for record in trace["traceEvents"] if record["ph"] == "X"]
    assert (span["name"], span["ts"], span["dur"]) == ("step 1", pytest.approx(1e6), pytest.approx(2e6))


def test_each_role_has_its_row() -> None:
    events = [
        worker_started(1.0, "replica-1"),
        published(2.0, 1, 0.1),
        pulled(3.0, "replica-0"),
        report(4.0, "replica-0", 5, 1.0, 1.0),
        moved(5.0),
        worker_died(6.0, "replica-1"),
    ]
    trace = chrome_trace(events)
    rows = {r["args"]["name"]: r["tid"] for r in trace["traceEvents"] if r["ph"] == "M"}
    assert rows.keys() == {"replica-1", "trainer", "replica-0"}
    assert {r["name"] for r in trace["traceEvents"] if r.get("tid") == rows["replica-0"]} >= {
        "pull 1",
        "moved to replica-1",
    }
    assert json.loads(json.dumps(trace)) == trace
