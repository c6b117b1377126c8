"""Events as lines of JSON: `events.jsonl` has them, `metrics.jsonl` one flat line a step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from millrace.core import files
from millrace.core.errors import DataError, boundary, writing
from millrace.core.events import Event, Sink
from millrace.observe.environment_use import EnvironmentUse
from millrace.observe.sinks.log_files import PART_BYTES, opened, remove_left_over, rotate

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


_ENCODER = msgspec.json.Encoder(enc_hook=repr)
_TAIL_BYTES = 65536


class EventLog:
    """Appends every event as one line: `kind`, `time_s`, `wall_s` and the event's own fields.

    Each line is written at once: a killed run keeps its lines, and `tail -F` follows a live run. Of a long
    run the log keeps only some reports of replicas; see `observe.sinks.jsonl`. A file of `part_bytes` is
    closed and a new one begins; see `observe.sinks.log_files`.
    """

    def __init__(self, path: Path, part_bytes: int = PART_BYTES) -> None:
        self._path, self._part_bytes = path, part_bytes
        remove_left_over(path)
        self._thinned = Thinned(self._write)
        self._open()

    def __call__(self, event: Event) -> None:
        self._thinned(event)

    def _write(self, event: Event) -> None:
        head = {"kind": event.kind, "time_s": event.time_s, "wall_s": event.wall_s}
        self._num_bytes += _write_line(self._file, head | event.fields)
        if self._num_bytes >= self._part_bytes:
            rotate(self._path)
            full = self._file
            self._open()
            full.close()

    def _open(self) -> None:
        self._file = _append(self._path)
        self._num_bytes = self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        self._file.close()


class MetricsLog:
    """Appends one line per batch that was applied: `version`, `wall_s`, `replayed` and every scalar of it.
    `environment`: a sink of the same events."""

    kinds = ("step",)

    def __init__(self, path: Path, environment: EnvironmentUse | None = None) -> None:
        self._file = _append(path)
        self._environment = environment or EnvironmentUse()

    def __call__(self, event: Event) -> None:
        if event.kind != "step":
            return
        fields = event.fields
        head = {
            "version": fields["version"],
            "wall_s": event.wall_s,
            "replayed": fields.get("replayed", False),
        }
        _write_line(self._file, head | step_scalars(fields) | self._environment.scalars(event))

    def close(self) -> None:
        self._file.close()


def read_events(path: Path, *kinds: str) -> Iterator[Event]:
    """The events of an earlier `EventLog`, in order, from all its files. With `kinds`: only these events. A
    last line that a crash cut short is left out.

    Keys of mappings inside the fields are strings, as in the file.
    Raises DataError: another line cannot be read. OSError: there is no such log.
    """
    start = tuple(f'{{"kind":"{kind}"'.encode() for kind in kinds) or b""
    with opened(path) as logs:
        for log, file in logs:
            for number, line in enumerate(files.lines(file, log), 1):
                if line.endswith(b"\n") and line.startswith(start):
                    yield event_of(line, f"{log}:{number}")


def replay_events(path: Path, sinks: Sequence[Sink], conclude: Callable[[], object]) -> None:
    """Send `sinks` the events of an earlier `EventLog`, in order. `conclude` is called once at the end: so a
    damaged event is an error now and not at the end of the run.

    Raises DataError: a line cannot be read, or lacks a field that a sink needs.
    """
    for number, event in enumerate(read_events(path), 1):
        with boundary(f"{path}:{number}", f"not a whole {event.kind!r} event", DataError):
            for sink in sinks:
                sink(event)
    with boundary(str(path), "its events do not make sense together", DataError):
        conclude()


class _Head(msgspec.Struct):
    kind: str
    time_s: float
    wall_s: float


def event_of(line: bytes, where: str) -> Event:
    """The event that one line holds. Raises DataError naming `where`."""
    try:
        head, fields = _HEAD.decode(line), msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{where}: not an event: {error}") from error
    named = {key: value for key, value in fields.items() if key not in _Head.__struct_fields__}
    return Event(head.kind, head.time_s, head.wall_s, named)


_HEAD = msgspec.json.Decoder(_Head)


def _append(path: Path) -> BinaryIO:
    """Open `path` unbuffered, at the end of its last complete line. Removes a line that a crash cut short."""
    with writing(path):
        file = open(path, "ab+", buffering=0)  # noqa: SIM115 - closed by the sink's close
    end = file.tell()
    while end > 0:
        start = max(0, end - _TAIL_BYTES)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    file.truncate(end)
    return file


def _write_line(file: BinaryIO, record: dict[str, Any]) -> int:
    """Write all of a line or nothing. Returns its bytes. Raises StorageError."""
    line, written = encoded(record) + b"\n", 0
    try:
        while written < len(line):  # a disk that fills up may write only some bytes
            written += file.write(line[written:])
    except OSError:
        with writing(file.name):
            file.truncate(file.seek(0, os.SEEK_END) - written)
            raise
    return written


def encoded(record: dict[str, Any]) -> bytes:
    """The record as JSON. A field that JSON cannot express is written as text; nothing is raised."""
    try:
        return _ENCODER.encode(record)
    except (TypeError, ValueError, OverflowError):
        return _ENCODER.encode({name: _plain(value) for name, value in record.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, str):  # half of a surrogate pair may be in it
        return value.encode(errors="backslashreplace").decode()
    return value if isinstance(value, float | bool) else repr(value)


_NAMES = {
    "reward_mean": "reward/mean",
    "staleness_mean": "staleness/mean",
    "staleness_max": "staleness/max",
    "trained_tokens": "tokens/trained",
    "step_s": "time/step_s",
    "wait_s": "time/wait_s",
    "groups_ready": "groups/ready",
}
_WINDOW = {"staleness_mean": "window/staleness", "fairness": "window/fairness", "next": "window/next"}


def step_scalars(fields: Mapping[str, Any]) -> dict[str, float]:
    """Names as `reward/mean`, `reward_metrics/<name>`, `trainer/<metric>`,
    `logprob_gap/<staleness>/mean`, `accounting/<state>`."""
    scalars = {name: fields[key] for key, name in _NAMES.items() if key in fields}
    window = fields.get("window") or {}
    scalars |= {name: window[key] for key, name in _WINDOW.items() if key in window}
    for staleness, (mean, largest, _tokens) in (fields.get("logprob_gap") or {}).items():
        scalars[f"logprob_gap/{staleness}/mean"] = mean
        scalars[f"logprob_gap/{staleness}/max"] = largest
    screened = fields.get("groups_screened") or {}
    scalars |= {f"groups/screened_{name}": value for name, value in screened.items()}
    measured = fields.get("reward_metrics") or {}
    scalars |= {f"reward_metrics/{name}": value for name, value in measured.items()}
    chosen = fields.get("selection") or {}
    scalars |= {f"selection/{name}": value for name, value in chosen.items()}
    scalars |= {f"episodes/{name}": float(num) for name, num in (fields.get("episodes") or {}).items()}
    scalars |= {f"trainer/{name}": value for name, value in (fields.get("metrics") or {}).items()}
    scalars |= {f"accounting/{name}": value for name, value in (fields.get("accounting") or {}).items()}
    return {name: value for name, value in scalars.items() if isinstance(value, int | float)}


def scalars_of(kind: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """The scalars of a step that was not replayed, or of an evaluation. Other events have none."""
    if kind == "step":
        return {} if fields.get("replayed") else step_scalars(fields)
    return evaluation_scalars(fields) if kind == "evaluated" else {}


def evaluation_scalars(fields: Mapping[str, Any]) -> dict[str, float]:
    """Names as `evaluation/<name>/greedy`, `evaluation/<name>/pass_at_4`."""
    metrics = fields["metrics"]
    figures = {
        "greedy": metrics["greedy_accuracy"],
        "sampled": metrics["sampled_accuracy"],
        "reward": metrics["reward_mean"],
    }
    for name in ("pass_at_k", "majority_at_k"):
        figures |= {name.removesuffix("k") + k: value for k, value in metrics[name].items()}
    return {f"evaluation/{fields['name']}/{k}": value for k, value in figures.items() if value is not None}
