"""The finished runs of the study of staleness, in one JSON file: a run a line, in the order of its name."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from staleness_costs import Outcome
from staleness_design import Run


class StalenessResults:
    """`design`: what all runs have in common. A file of another one is refused.

    Raises: SystemExit: this file is of another design.
    """

    def __init__(self, path: Path, design: str) -> None:
        self.path, self._design = path, design
        self.runs: dict[Run, dict[str, Any]] = self._read()

    @property
    def rewards(self) -> dict[Run, list[float]]:
        return {run: self.outcome(run).rewards for run in self.runs}

    def outcome(self, run: Run) -> Outcome:
        summary = self.runs[run]
        return Outcome([reward / 1000 for reward in summary["rewards"]], summary["greedy"])

    def of_size(self, size: str) -> list[dict[str, Any]]:
        return [summary for run, summary in self.runs.items() if run.size == size]

    def add(self, run: Run, summary: dict[str, Any]) -> None:
        """Keep it, beside what another process kept meanwhile."""
        self.runs = self._read() | self.runs | {run: summary}
        rows = [json.dumps(asdict(one) | kept) for one, kept in sorted(self.runs.items(), key=_order)]
        text = f'{{"design": {json.dumps(self._design)}, "runs": [\n' + ",\n".join(rows) + "\n]}\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(f".{os.getpid()}")
        partial.write_text(text)
        partial.replace(self.path)

    def _read(self) -> dict[Run, dict[str, Any]]:
        if not self.path.exists():
            return {}
        kept = json.loads(self.path.read_text())
        if kept["design"] != self._design:
            raise SystemExit(
                f"{self.path} is of another design of the study. Name another file: --results FILE"
            )
        fields = Run.__dataclass_fields__
        return {
            Run(**{name: row[name] for name in fields}): {k: v for k, v in row.items() if k not in fields}
            for row in kept["runs"]
        }


def _order(item: tuple[Run, dict[str, Any]]) -> tuple[Any, ...]:
    run = item[0]
    return run.size, run.seed, run.correction, run.staleness, run.rate
