"""A run as a structured log."""

from __future__ import annotations

import io
import json

from observe_events import event, report, run_ended, run_started, step, worker_died

from millrace.observe.live.live_view import StructuredLog


def test_every_line_is_json_with_a_level_a_text_and_the_event() -> None:
    stream = io.StringIO()
    log = StructuredLog(stream)
    events = (
        run_started(),
        report(1.0, "replica-0", 5, 1.0, 0.5),
        event("finished", 1.0, trajectory_id=1, tokens=5, versions_min=0, versions_max=0, finish="stop"),
        step(2.0, 1),
        worker_died(3.0, "replica-0"),
        event("warned", 3.0, source="notify", reason="line one\nline \u2581"),
        run_ended(4.0, ok=False),
    )
    for item in events:
        log(item)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["kind"], line["level"]) for line in lines] == [
        ("run_started", "info"),
        ("step", "info"),
        ("worker_died", "warning"),
        ("warned", "warning"),
        ("run_ended", "error"),
    ]
    assert lines[1]["fields"]["version"] == 1 and lines[1]["text"].startswith("step 1/4 | reward 0.100")
    assert lines[1]["wall_s"] == 1002.0


def test_any_text_of_a_run_is_written_whatever_the_encoding_of_the_terminal() -> None:
    written = io.BytesIO()
    log = StructuredLog(io.TextIOWrapper(written, encoding="latin-1"))
    log(event("warned", 3.0, source="notify", reason="\u2581"))
    log(event("warned", 3.0, source="notify", reason="half \ud800"))
    first, second = (json.loads(line) for line in written.getvalue().splitlines())
    assert first["fields"]["reason"] == "\u2581" and "half" in str(second["fields"])
