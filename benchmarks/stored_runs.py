"""Runs that are kept: each is a JSON file in a directory. So a later call, or another one at the same time,
makes only those that are missing. A run that differs in anything (steps, settings) has another name."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import say
from loop_vs_trl import Bench, Step, tokens_per_s
from peers.start import TASKS

from millrace.core.fairness import LengthMoments, fairness, next_correlation, windows

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t, two-sided 95 %, by degrees of freedom from 1 on."""


@dataclass(frozen=True)
class Spec:
    """One run. `ours` changes `loop_vs_trl.OURS`."""

    task: str
    name: str
    seed: int
    steps: int
    setting: str = "default"
    ours: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def file(self) -> str:
        words = self.task, self.setting, self.name, f"{self.steps}-steps", f"seed-{self.seed}"
        return "_".join(word.replace(" ", "-") for word in words) + ".json"


@dataclass(frozen=True)
class Kept:
    """What a run left."""

    steps: list[dict[str, Any]]
    ours: dict[str, Any]
    code: str
    load: float  # average over the minute at its end: of other programs and the run itself

    @property
    def rewards(self) -> list[float]:
        return [step["reward"] for step in self.steps]

    @property
    def curve(self) -> list[Step]:
        return [Step(step["t_s"], step["tokens"], step["reward"]) for step in self.steps]

    @property
    def tokens_per_s(self) -> float:
        return tokens_per_s(self.curve)

    @property
    def staleness_mean(self) -> float:
        """Over trained tokens."""
        tokens = sum(step["tokens"] for step in self.steps)
        return float(sum(step["staleness_mean"] * step["tokens"] for step in self.steps) / tokens)

    @property
    def trainer_waits(self) -> float:
        """Of the time after the first batch."""
        span_s = self.steps[-1]["t_s"] - self.steps[0]["t_s"]
        return float(sum(step["wait_s"] for step in self.steps[1:]) / span_s)

    @property
    def fairness(self) -> float:
        """The mean over whole windows of 32 batches, or of all batches if there are fewer; 1.0 where lengths
        are equal."""
        found = [fairness(part) for part in self._windows]
        return sum(1.0 if value is None else value for value in found) / len(found)

    @property
    def next(self) -> float:
        found = [next_correlation(part) or 0.0 for part in self._windows]
        return sum(found) / len(found)

    @property
    def _windows(self) -> list[Sequence[LengthMoments]]:
        lengths = [LengthMoments(*step["lengths"]) for step in self.steps]
        return windows(lengths) or [lengths]


Make = Callable[[Spec], list[dict[str, Any]]]
"""Makes a run, and returns what is kept of each of its steps."""


class Store:
    """Kept runs in a directory. `make`: how one is made; None: as `loop_vs_trl.py` does."""

    def __init__(self, path: Path, make: Make | None = None) -> None:
        self.path, self._make = path, make or _run
        path.mkdir(parents=True, exist_ok=True)

    def get(self, spec: Spec) -> Kept | None:
        """None: it was not made, or with other settings."""
        file = self.path / spec.file
        kept = Kept(**json.loads(file.read_text())) if file.exists() else None
        return kept if kept is not None and kept.ours == spec.ours else None

    def complete(self, specs: Iterable[Spec]) -> None:
        """Make the missing runs in their order; a line on stderr for each."""
        for spec in specs:
            if self.get(spec) is None:
                began = time.monotonic()
                kept = Kept(self._make(spec), spec.ours, _code(), os.getloadavg()[0])
                partial = self.path / f"{spec.file}.{os.getpid()}"
                partial.write_text(json.dumps(vars(kept)))
                partial.replace(self.path / spec.file)
                say(f"{spec.file}: {time.monotonic() - began:.0f} s")

    def all(self, specs: Iterable[Spec]) -> dict[Spec, Kept]:
        """Those of `specs` that are kept."""
        found = {spec: kept for spec in specs if (kept := self.get(spec)) is not None}
        codes = {kept.code for kept in found.values()}
        if len(codes) > 1:
            say(f"these runs are of {len(codes)} states of the code: {', '.join(sorted(codes))}")
        return found


def _run(spec: Spec) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(TASKS[spec.task], spec.steps, Path(directory))
        return [kept_step(event) for event in bench.train("ours", spec.seed, **spec.ours)]


def kept_step(event: dict[str, Any]) -> dict[str, Any]:
    lengths = event["lengths"]
    return {
        "t_s": event["time_s"],
        "tokens": event["trained_tokens"],
        "reward": event["reward_mean"],
        "wait_s": event["wait_s"],
        "step_s": event["step_s"],
        "staleness_mean": event["staleness_mean"],
        "lengths": [lengths["groups"], lengths["mean"], lengths["std"]],
    }


def _code() -> str:
    """The commit, with a mark where files differ from it."""
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "unknown"


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean, and half the width of its 95 % confidence interval (Student's t); None for one value."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, T_975[min(len(values) - 2, len(T_975) - 1)] * (variance / len(values)) ** 0.5


def plus_minus(values: Sequence[float], digits: int = 3) -> str:
    mean, half = interval(values)
    return f"{mean:.{digits}f}" + ("" if half is None else f" +- {half:.{digits}f}")
