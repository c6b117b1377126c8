"""A trial's metric so far, read from its run directory while the run writes there."""

from __future__ import annotations

from contextlib import suppress
from difflib import get_close_matches
from typing import Any

import msgspec

from millrace.core.errors import DataError, LedgerError, boundary
from millrace.estimates.evaluation import figure
from millrace.ledger.reading import LedgerReader
from millrace.observe.sinks.jsonl import evaluation_scalars
from millrace.observe.sinks.log_files import Tail
from millrace.run_directory.run_directory import RunDirectory
from millrace_sweeps.decisions.stopping import Series
from millrace_sweeps.loading import EVALUATION


class Measured:
    """The series of one metric of one run. `step` is the last version so far."""

    def __init__(self, run: RunDirectory, metric: str, by: str = "greedy") -> None:
        self._run, self._metric, self._by = run, metric, by
        self._tail = Tail(run.metrics)
        self._values: dict[int, float] = {}
        self._names: set[str] = set()
        self.step = 0

    def update(self, *, ended: bool = False) -> bool:
        """Read what is new; with `ended` also evaluations after the last step. True: there are new steps.

        Raises: DataError: a line is damaged.
        """
        before = self.step
        for taken in iter(self._tail.take, []):
            for line in taken:
                with boundary(str(self._run.metrics), "a line is damaged", DataError):
                    self._take(msgspec.json.decode(line, type=dict[str, Any]))
        if (ended or self.step > before) and self._metric.startswith(EVALUATION):
            self._evaluate()
        return self.step > before

    @property
    def series(self) -> Series:
        return sorted(self._values.items())

    @property
    def trouble(self) -> str:
        """Why there is no value yet, if the run has steps. Empty: there is one, or there are no steps."""
        if self._values or not self.step:
            return ""
        if self._metric.startswith(EVALUATION):
            return f"the run has no value of `metric` ({self._metric!r}) yet"
        near = get_close_matches(self._metric, self._names, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "metrics.jsonl of the run has the names"
        return f"the run has no metric {self._metric!r}. {hint}"

    def _take(self, line: dict[str, Any]) -> None:
        version, value = line["version"], line.get(self._metric)
        self.step = max(self.step, version)
        self._names |= line.keys()
        if isinstance(value, int | float) and not (line["replayed"] and version in self._values):
            self._values[version] = float(value)

    def _evaluate(self) -> None:
        """An evaluation ends some steps after its version's, and the last one before the run does."""
        with suppress(LedgerError), LedgerReader(self._run.ledger, check=False) as reader:
            for record in reader.evaluations():
                if record.reason:
                    continue
                scalars = evaluation_scalars({"name": record.name, "metrics": record.metrics})
                short = f"{EVALUATION}{record.name}"
                by = figure(record.metrics, self._by)
                if (value := by if self._metric == short else scalars.get(self._metric)) is not None:
                    self._values[record.version] = value
