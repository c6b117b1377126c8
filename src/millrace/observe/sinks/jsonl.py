"""Events as lines of JSON: `events.jsonl` has them, `metrics.jsonl` one flat line a step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from millrace.core import files
from millrace.core.errors import DataError, boundary, writing
from millrace.core.events import Event, Sink
from millrace.observe.environment_use import EnvironmentUse
from millrace.observe.sinks.log_files import PART_BYTES, opened, remove_left_over, rotate
from millrace.observe.sinks.scalars import step_scalars
from millrace.observe.sinks.thinned import Thinned

_ENCODER = msgspec.json.Encoder(enc_hook=repr)
_TAIL_BYTES = 65536


class EventLog:
    """Appends every event as one line: `kind`, `time_s`, `wall_s` and the event's own fields.

    Each line is written at once: a killed run keeps its lines, and `tail -F` follows a live run. Of a long
    run the log keeps only some reports of replicas; see `observe.sinks.thinned`. A file of `part_bytes` is
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
    """Appends one line per batch that was applied: `version`, `wall_s`, `replayed` and every scalar of it."""

    def __init__(self, path: Path) -> None:
        self._file = _append(path)
        self._environment = EnvironmentUse()

    def __call__(self, event: Event) -> None:
        self._environment(event)
        if event.kind != "step":
            return
        fields = event.fields
        head = {
            "version": fields["version"],
            "wall_s": event.wall_s,
            "replayed": fields.get("replayed", False),
        }
        _write_line(self._file, head | step_scalars(fields) | self._environment.take_scalars())

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
