"""A run on a timeline: events as a Chrome trace, for Perfetto or chrome://tracing.

Every role is a process with one row. A duration of an event becomes a slice that ends at the event's time.
The slice of a publish ends when the digest begins. An event comes some time after its slice has ended, so a
slice may seem to begin inside another slice of its row. Then it begins at the end of that slice. Deaths and
moves become marks. Replica rows also have counters of running and waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from millrace.core.events import Event

Record = dict[str, Any]


def chrome_trace(events: Iterable[Event]) -> dict[str, Any]:
    """The JSON object of a trace file. Times are microseconds since the first event."""
    rows: dict[str, int] = {}
    records: list[Record] = []
    origin: float | None = None
    for event in events:
        if origin is None:
            origin = event.wall_s
        now_us = (event.wall_s - origin) * 1e6
        for row, record in records_of(event, now_us):
            number = rows.setdefault(row, len(rows) + 1)  # 0 is the idle process
            records.append({"pid": number, "tid": number, **record})
    names: list[Record] = [
        {"ph": "M", "pid": row, "tid": row, "name": kind, "args": {"name": name}}
        for name, row in rows.items()
        for kind in ("process_name", "thread_name")
    ]
    _nest(record for record in records if record["ph"] == "X")
    return {"traceEvents": names + records, "displayTimeUnit": "ms"}


def _nest(slices: Iterable[Record]) -> None:
    """On each row a slice begins after the end of the slice before, or ends inside that slice."""
    rows: dict[int, list[tuple[float, float]]] = {}  # begins and ends of slices, each inside the one before
    for record in sorted(slices, key=lambda record: (record["ts"], -record["dur"])):
        around = rows.setdefault(record["tid"], [])
        begin_us, end_us = record["ts"], record["ts"] + record["dur"]
        while around and (around[-1][1] <= begin_us or around[-1][1] < end_us):
            begin_us = max(begin_us, around.pop()[1])
        if around:
            begin_us = max(begin_us, around[-1][0])
        if begin_us != record["ts"]:
            record["ts"], record["dur"] = begin_us, max(0.0, end_us - begin_us)
        around.append((begin_us, end_us))


_SLICES: dict[str, tuple[str, str, str]] = {  # kind: (row, field of the duration, label)
    "step": ("trainer", "step_s", "step {version}"),
    "published": ("trainer", "stall_s", "publish {version}"),
    "checkpoint": ("checkpoint", "save_s", "checkpoint {version}"),
    "staged": ("relay", "stage_s", "stage {version}"),
    "fetched": ("relay-{host}", "fetch_s", "fetch {version}"),
    "pulled": ("{replica}", "pull_s", "pull {version}"),
    "slept": ("{name}", "took_s", "sleep"),
    "woke": ("{name}", "took_s", "wake"),
    "worker_started": ("{name}", "spawn_s", "spawn"),
    "worker_recovered": ("{name}", "recovery_s", "recovery"),
}

_MARKS: dict[str, tuple[str, str]] = {  # kind: (row, label)
    "worker_died": ("{name}", "died: {cause}"),
    "moved": ("{source}", "moved to {destination}"),
    "joined": ("{replica}", "joined"),
    "leaving": ("{replica}", "leaves: {reason}"),
    "quarantined": ("controller", "quarantined {row_id}"),
    "stalled": ("controller", "stalled"),
}


def records_of(event: Event, now_us: float) -> Iterator[tuple[str, Record]]:
    """The rows and records of an event at `now_us`. The category of a record is the event's kind."""
    fields = event.fields
    if event.kind in _SLICES:
        row, duration, label = _SLICES[event.kind]
        slice_us = fields[duration] * 1e6
        now_us -= fields.get("digest_s", 0.0) * 1e6
        record = {
            "ph": "X",
            "cat": event.kind,
            "name": label.format(**fields),
            "ts": now_us - slice_us,
            "dur": slice_us,
        }
        yield row.format(**fields), record
    elif event.kind in _MARKS:
        row, label = _MARKS[event.kind]
        mark = {"ph": "i", "s": "t", "cat": event.kind, "name": label.format(**fields), "ts": now_us}
        yield row.format(**fields), mark
    elif event.kind == "report":
        load = {"running": fields["running"], "waiting": fields["waiting"]}
        yield fields["replica"], {"ph": "C", "name": fields["replica"], "ts": now_us, "args": load}
