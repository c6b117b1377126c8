"""A trace shows durations as spans on the row of who spent them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observe_events import moved, published, pulled, report, run_started, step, worker_died, worker_started

from millrace.observe.timeline import chrome_trace


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
    names = [r for r in trace["traceEvents"] if r["ph"] == "M"]
    processes = {r["args"]["name"]: r["pid"] for r in names if r["name"] == "process_name"}
    threads = {r["args"]["name"]: r["pid"] for r in names if r["name"] == "thread_name"}
    assert processes == threads and processes.keys() == {"replica-1", "trainer", "replica-0"}
    assert {r["name"] for r in trace["traceEvents"] if r["pid"] == processes["replica-0"]} >= {
        "pull 1",
        "moved to replica-1",
        "replica-0",
    }
    assert all(r["pid"] > 0 and r["tid"] > 0 for r in trace["traceEvents"]), "0 is the idle process"
    assert json.loads(json.dumps(trace)) == trace


def test_spans_of_a_row_follow_each_other_or_are_inside_each_other() -> None:
    events = [
        run_started(0.0),
        published(2.0, 1, 1.0),  # from 1 to 2
        step(3.0, 2, step_s=1.5),  # told late: it seems to begin at 1.5, inside of the publish
        step(9.0, 3, step_s=4.0),
        published(8.0, 3, 1.0),
    ]
    spans = [
        (r["name"], r["ts"] / 1e6, r["dur"] / 1e6)
        for r in chrome_trace(events)["traceEvents"]
        if r["ph"] == "X"
    ]
    assert spans == [
        ("publish 1", pytest.approx(1.0), pytest.approx(1.0)),
        ("step 2", pytest.approx(2.0), pytest.approx(1.0)),
        ("step 3", pytest.approx(5.0), pytest.approx(4.0)),
        ("publish 3", pytest.approx(7.0), pytest.approx(1.0)),
    ]


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: step(pair[0], 1, step_s=pair[1])),
        max_size=8,
    )
)
def test_no_two_spans_of_a_row_cross(events) -> None:
    spans = [r for r in chrome_trace(events)["traceEvents"] if r["ph"] == "X"]
    for one in spans:
        for other in spans:
            begins, ends = one["ts"] < other["ts"], one["ts"] + one["dur"]
            crosses = begins and other["ts"] < ends < other["ts"] + other["dur"]
            assert not crosses and one["dur"] >= 0
