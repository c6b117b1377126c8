"""The runs of a directory as rows, and which of them a list shows and how: the choices in its address. Small
files are read whole, of long files a few lines.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from sys import intern
from typing import Any
from urllib.parse import urlencode

import msgspec

from millrace.config.foreign import with_present_names
from millrace.core import files
from millrace.core.errors import DataError, MillraceError, boundary
from millrace.observe.sinks.log_files import parts
from millrace.run.resume import flat
from millrace.run_directory.run_directory import CONFIG_BYTES_MAX, RunDirectory

RUNS_MAX = 200
"""A list shows so many runs unless a query names more: the runs that were started or resumed last."""
_TAIL_BYTES = 65536


@dataclass(frozen=True, slots=True)
class RunLine:
    """A run in a list. `trouble` says why the other fields are empty."""

    name: str
    state: str
    version: int
    steps: int
    schedule: str
    reward: float | None
    trouble: str = ""


def find_runs(root: Path) -> dict[str, RunDirectory]:
    """Runs by name, the newest first. A name is the path below `root`; `root` itself may be a run.

    Raises: DataError: there is no run.
    """
    if _is_run(root):
        return {root.resolve().name: RunDirectory(root.resolve())}
    paths = sorted(_runs_below(root), key=_started_s, reverse=True)
    if not paths:
        raise DataError(
            f"{root} is no run directory and holds none: no config.json beside an events.jsonl\n"
            "  Start a run with `millrace train`, or name the directory of your runs."
        )
    return {_name(path.relative_to(root)): RunDirectory(path.resolve()) for path in paths}


def run_line(name: str, run: RunDirectory) -> RunLine:
    """Never raises: the line says what is wrong with the run."""
    try:
        config = run.read_config()
        last = last_step(run.metrics)
        state = state_of(run, last.version, config.steps)
    except (MillraceError, OSError) as error:
        return RunLine(name, "unreadable", 0, 0, "", None, trouble=str(error))
    return RunLine(name, state, last.version, config.steps, config.schedule.kind, last.reward)


def state_of(run: RunDirectory, version: int, steps: int) -> str:
    if run.is_owned():
        return "running"
    return "finished" if version >= steps else "stopped"


class LastStep(msgspec.Struct):
    version: int = 0
    reward: float | None = msgspec.field(default=None, name="reward/mean")


def last_step(metrics: Path) -> LastStep:
    """Reads the last whole line of `metrics.jsonl`. Raises DataError: the line is damaged."""
    if not metrics.exists():
        return LastStep()
    with files.opened(metrics) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        tail = file.read(_TAIL_BYTES)
        lines = tail.rpartition(b"\n")[0].splitlines()
    if not lines and len(tail) == _TAIL_BYTES:
        raise DataError(f"{metrics}: its last {_TAIL_BYTES:,} bytes are no whole line")
    with boundary(str(metrics), "the last line is damaged", DataError):
        return msgspec.json.decode(lines[-1], type=LastStep) if lines else LastStep()


def _runs_below(root: Path) -> Iterator[Path]:
    for pattern in ("*/config.json", "*/*/config.json"):
        yield from (path.parent for path in root.glob(pattern) if _is_run(path.parent))


def _is_run(path: Path) -> bool:
    """A model has a config.json too. While a log is rotated, only its older parts exist."""
    events = path / "events.jsonl"
    return (path / "config.json").exists() and (events.exists() or bool(parts(events)))


def _name(path: Path) -> str:
    """The path, with a question mark for a byte that is no character."""
    return path.as_posix().encode(errors="replace").decode()


def _started_s(path: Path) -> float:
    try:
        return (path / "config.json").stat().st_mtime
    except OSError:
        return 0.0


SPARK_POINTS = 32
"""About so many steps of a run become its small curve of rewards."""
WHOLE_BYTES, LINE_BYTES = 1 << 16, 1 << 13
"""A log of metrics up to `WHOLE_BYTES` is read whole. A longer one is read at `SPARK_POINTS` places."""

Stamp = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run in a table. `keys` are those of its configuration. `started_s` is since the epoch, `took_s` is
    from there to the last step. `trouble` says why the other fields are empty."""

    name: str
    state: str = "unreadable"
    version: int = 0
    steps: int = 0
    started_s: float | None = None
    took_s: float | None = None
    rewards: tuple[float, ...] = ()
    keys: Mapping[str, Any] = field(default_factory=dict)
    trouble: str = ""

    @property
    def reward(self) -> float | None:
        return self.rewards[-1] if self.rewards else None

    @property
    def tags(self) -> list[str]:
        tags = self.keys.get("observe.tags")
        return [str(tag) for tag in tags] if isinstance(tags, list) else []

    @property
    def task(self) -> str:
        """The name of its data set, or the end of its path."""
        return str(self.keys.get("task.name") or _end(self.keys.get("task.path")))

    @property
    def model(self) -> str:
        return _end(self.keys.get("model.path"))

    @property
    def algorithm(self) -> str:
        return str(self.keys.get("algorithm.kind", ""))

    @property
    def schedule(self) -> str:
        return str(self.keys.get("schedule.kind", ""))


class RunRows:
    """Rows of runs. A run whose files did not change is not read again. Not for use from several threads."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Stamp, RunRow]] = {}

    def of(self, runs: Mapping[str, RunDirectory]) -> list[RunRow]:
        """Never raises: a row says what is wrong with its run. Runs that are gone are forgotten."""
        self._kept = {name: self._read(name, run) for name, run in runs.items()}
        return [
            row if row.trouble else replace(row, state=state_of(runs[row.name], row.version, row.steps))
            for _, row in self._kept.values()
        ]

    def _read(self, name: str, run: RunDirectory) -> tuple[Stamp, RunRow]:
        stamp = run.path, *map(_stamp, (run.config, run.metrics))
        kept = self._kept.get(name)
        if kept is not None and kept[0] == stamp:
            return kept
        try:
            row = run_row(name, run)
        except MillraceError as error:
            return stamp, RunRow(name, trouble=str(error))
        except OSError as error:  # it may pass
            return (), RunRow(name, trouble=str(error))
        return stamp if row.started_s is not None else (), row


def run_row(name: str, run: RunDirectory) -> RunRow:
    """The configuration is read as it is, and not checked: a check takes longer than all the rest.

    Raises: DataError, OSError: a file is damaged, or cannot be read.
    """
    tree = files.read_json(run.config, CONFIG_BYTES_MAX)
    with boundary(str(run.config), "it is no configuration", DataError):
        keys = {intern(key): value for key, value in flat(with_present_names(tree))}
        steps = msgspec.convert(keys["steps"], int)
    sampled = sampled_steps(run.metrics)
    started_s = first_wall_s(run.events)
    took_s = sampled[-1].wall_s - started_s if sampled and started_s is not None else None
    return RunRow(
        name,
        version=sampled[-1].version if sampled else 0,
        steps=steps,
        started_s=started_s,
        took_s=took_s,
        rewards=tuple(step.reward for step in sampled if step.reward is not None),
        keys=keys,
    )


class SampledStep(LastStep):
    wall_s: float = 0.0


def sampled_steps(metrics: Path) -> list[SampledStep]:
    """Some steps of `metrics.jsonl`, and the last. Steps that a rewind undid are gone. Raises: DataError."""
    if not metrics.exists():
        return []
    with files.opened(metrics) as file:
        size = file.seek(0, os.SEEK_END)
        if size <= WHOLE_BYTES:
            file.seek(0)
            lines = file.read(WHOLE_BYTES).rpartition(b"\n")[0].splitlines()
            lines = lines[:: max(1, len(lines) // SPARK_POINTS)] + lines[-1:]
        else:
            lines = []
            for i in range(SPARK_POINTS):
                file.seek(size * i // SPARK_POINTS)
                lines += _whole_line(file.read(LINE_BYTES), first=i == 0)
            file.seek(size - WHOLE_BYTES)
            lines += file.read(WHOLE_BYTES).rpartition(b"\n")[0].splitlines()[-1:]
            if not lines:
                raise DataError(f"{metrics}: a line is damaged: none ends in its last {WHOLE_BYTES:,} bytes")
    steps: list[SampledStep] = []
    with boundary(str(metrics), "a line is damaged", DataError):
        for step in msgspec.json.Decoder(SampledStep).decode_lines(b"\n".join(lines)):
            while steps and steps[-1].version >= step.version:
                steps.pop()
            steps.append(step)
    return steps


def first_wall_s(events: Path) -> float | None:
    """When the run began. None: its log has no whole line yet. Raises: DataError, OSError."""
    for part in parts(events)[:1]:
        with files.opened(part) as file:
            line = file.readline(WHOLE_BYTES)
        if line.endswith(b"\n"):
            with boundary(str(part), "the first line is damaged", DataError):
                wall_s = msgspec.json.decode(line, type=_FirstEvent).wall_s
                datetime.fromtimestamp(wall_s)  # raises where it is no time
                return wall_s
    return None


def varying(rows: Iterable[RunRow]) -> list[str]:
    """Keys of configurations that differ among the rows, in the order of the first row that has them."""
    seen: dict[str, Any] = {}
    differ: dict[str, None] = {}
    known = [row for row in rows if not row.trouble]
    for row in known:
        for key, value in row.keys.items():
            if seen.setdefault(key, value) != value:
                differ[key] = None
    if any(len(row.keys) < len(seen) for row in known):
        differ |= {key: None for key in seen if any(key not in row.keys for row in known)}
    return [key for key in seen if key in differ]


class _FirstEvent(msgspec.Struct):
    wall_s: float


def _whole_line(data: bytes, *, first: bool) -> list[bytes]:
    begin = 0 if first else data.find(b"\n") + 1
    end = data.find(b"\n", begin)
    return [data[begin:end]] if (first or begin) and end > 0 else []


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def _end(path: object) -> str:
    return str(path or "").rstrip("/").rpartition("/")[2]


# ---------------------------------------------------------------- what a list shows


COLUMNS: dict[str, Callable[[RunRow], Any]] = {
    "run": lambda row: row.name,
    "state": lambda row: row.state,
    "step": lambda row: row.version,
    "reward": lambda row: row.reward,
    "started": lambda row: row.started_s,
    "duration": lambda row: row.took_s,
    "model": lambda row: row.model,
    "task": lambda row: row.task,
    "algorithm": lambda row: row.algorithm,
    "schedule": lambda row: row.schedule,
    "tags": lambda row: ", ".join(row.tags),
}
"""What a column shows and sorts by. A narrow window has the first ones."""
LARGEST_FIRST = ("started", "duration", "step", "reward")
WORDS = ("run", "state", "model", "task", "algorithm", "schedule", "tags")
"""Columns in which a word of a search is looked for."""


@dataclass(frozen=True, slots=True)
class RunsView:
    """`find`: words that a run must all have; `KEY=VALUE` is a key of its configuration, `-WORD` leaves out.
    `sort`: a column; empty: as given. `reverse` turns the order round. `group`: a column or a key."""

    find: str = ""
    sort: str = ""
    reverse: str = ""
    group: str = ""
    num: str = ""

    @classmethod
    def of(cls, query: Mapping[str, list[str]]) -> RunsView:
        given = {one.name: (query.get(one.name) or [""])[0] for one in fields(cls)}
        return cls(**given | {"sort": given["sort"] if given["sort"] in COLUMNS else ""})

    def address(self, **changes: str) -> str:
        """The query string of this view with changes."""
        changed = replace(self, **changes)
        values = {one.name: getattr(changed, one.name) for one in fields(changed)}
        return "?" + urlencode({name: value for name, value in values.items() if value})

    def sorted_by(self, column: str) -> str:
        """The address of this view sorted by a column. A second time turns the order round."""
        again = self.sort == column and not self.reverse
        return self.address(sort=column, reverse="1" if again else "")

    @property
    def is_descending(self) -> bool:
        return (self.sort in LARGEST_FIRST) != bool(self.reverse)

    def chosen(self, rows: Sequence[RunRow]) -> list[RunRow]:
        """Runs without a value come last."""
        words = self.find.split()
        kept = [row for row in rows if all(_has(row, word) for word in words)]
        if not self.sort:
            return kept
        value = COLUMNS[self.sort]
        known = [row for row in kept if value(row) not in (None, "")]
        known.sort(key=value, reverse=self.is_descending)
        return known + [row for row in kept if value(row) in (None, "")]

    def groups(self, rows: Sequence[RunRow]) -> list[tuple[str, list[RunRow]]]:
        """Rows by the value of `group`, the value with most rows first. Without `group`: all rows."""
        if not self.group:
            return [("", list(rows))]
        grouped: dict[str, list[RunRow]] = {}
        for row in rows:
            grouped.setdefault(_value(row, self.group), []).append(row)
        return sorted(grouped.items(), key=lambda item: -len(item[1]))


def written(value: Any) -> str:
    """A value as a configuration file has it, without quotes."""
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


def _value(row: RunRow, name: str) -> str:
    if name in COLUMNS:
        return str(COLUMNS[name](row))
    return written(row.keys[name]) if name in row.keys else "not there"


def _has(row: RunRow, word: str) -> bool:
    if len(bare := word.lstrip("-")) < len(word) and bare:
        return _has(row, bare) == ((len(word) - len(bare)) % 2 == 0)
    key, equals, value = word.partition("=")
    if not (equals and key):
        return any(word.casefold() in str(COLUMNS[name](row)).casefold() for name in WORDS)
    if key in COLUMNS:
        return value.casefold() in _value(row, key).casefold()
    return any(
        _equal(written(own), value)
        for name, own in row.keys.items()
        if name == key or name.endswith(f".{key}")
    )


def _equal(own: str, wanted: str) -> bool:
    """1e-6 is 1e-06."""
    try:
        return float(own) == float(wanted)
    except ValueError:
        return own.casefold() == wanted.casefold()
