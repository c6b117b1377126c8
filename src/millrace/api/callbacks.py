"""Functions of the script that are called while its run trains.

The thread that waits for the run calls them, in the script's process, from the records that the run writes.
The run never waits for a function: after a slow one, the next records are already there, and come one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from millrace.core.errors import ConfigError, DataError, boundary
from millrace.ledger.reading import LedgerReader
from millrace.observe.sinks.log_files import Tail
from millrace.run_directory.run_directory import RunDirectory
from millrace.run_directory.views import evaluations_view

OnRecord = Callable[[dict[str, Any]], Any]


class Stop(Enum):
    """A function `on_step` or `on_evaluation` returns it to end the run after the step that is under way."""

    STOP = "stop"


STOP = Stop.STOP


class Callbacks:
    """Gives every step and evaluation to its function once, in order, until a function stops the run or
    raises. `position`: the bytes of `metrics.jsonl` that earlier sessions wrote."""

    def __init__(
        self, run: RunDirectory, on_step: OnRecord | None, on_evaluation: OnRecord | None, position: int
    ) -> None:
        self._run, self._on_step, self._on_evaluation = run, on_step, on_evaluation
        self._metrics = Tail(run.metrics, position)
        self._evaluated: list[tuple[str, int]] = []  # perhaps not in the ledger yet
        self._is_over = False
        self._raised: Exception | None = None

    def note(self, kind: str, fields: dict[str, Any]) -> None:
        """Take an event of the run into account."""
        if kind in ("evaluated", "evaluation_skipped") and self._on_evaluation is not None:
            self._evaluated.append((fields["name"], fields["version"]))
        elif kind == "rewound":  # what was undone never comes into the ledger
            self._evaluated = [one for one in self._evaluated if one[1] <= fields["version"]]

    def call(self) -> bool:
        """Call the functions for what is new. True, once: the run must end."""
        if self._is_over:
            return False
        try:
            self._is_over = self._steps() or self._evaluations()
        except Exception as error:
            self._is_over, self._raised = True, error
        return self._is_over

    def conclude(self) -> None:
        """Raises: what a function raised."""
        if self._raised is not None:
            raise self._raised

    def _steps(self) -> bool:
        if self._on_step is None:
            return False
        lines = new_lines(self._run.metrics, self._metrics)
        return any(self._on_step(line) is STOP for line in lines if not line["replayed"])

    def _evaluations(self) -> bool:
        if self._on_evaluation is None or not self._evaluated:
            return False
        with LedgerReader(self._run.ledger, check=False) as reader:
            records = evaluations_view(reader, self._run.read_config())
        by_key = {(record["name"], record["version"]): record for record in records}
        while self._evaluated and self._evaluated[0] in by_key:
            if self._on_evaluation(by_key[self._evaluated.pop(0)]) is STOP:
                return True
        return False


def refuse_unheard(wait: bool, *functions: OnRecord | None) -> None:
    """Raises: ConfigError: nobody would call the functions."""
    if not wait and any(functions):
        raise ConfigError(
            "`on_step` and `on_evaluation` are called while a script waits, and `wait` is False.\n"
            "  Pass them to `run.wait(on_step=..., on_evaluation=...)`"
        )


# ---------------------------------------------------------------- lines of a run's files


POLL_S = 0.1


def lines(
    path: Path, has_ended: Callable[[], bool], position: int = 0, *, pause_s: float = POLL_S
) -> Iterator[dict[str, Any] | None]:
    """Every line of a JSONL file until the run has ended, and None whenever no further line is there yet.

    `position` is the first byte to read. After a None there is a pause of `pause_s`. Raises DataError: a line
    is damaged.
    """
    tail = Tail(path, position)
    while True:
        last = has_ended()  # before reading, so that the last lines are read
        yield from new_lines(path, tail)
        if last:
            return
        yield None
        time.sleep(pause_s)


def new_lines(path: Path, tail: Tail) -> Iterator[dict[str, Any]]:
    """The lines of the file at `path` that `tail` has not taken yet. Raises DataError: a line is damaged."""
    for taken in iter(tail.take, []):
        for line in taken:
            with boundary(str(path), f"not a whole line: {line[:80]!r}", DataError):
                fields = msgspec.json.decode(line, type=dict[str, Any])
            yield fields
