"""The runs of a directory, and how far each is. Reads only small files, and the ends of long files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from millrace.core import files
from millrace.core.errors import DataError, MillraceError, boundary
from millrace.observe.sinks.log_files import parts
from millrace.run_directory.run_directory import RunDirectory

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
