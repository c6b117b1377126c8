"""What studies share: results of whole runs, kept as soon as they are made, and charts as files.

A study is a script. This module, imported first, lets it find the modules of benchmarks/.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from common import ROOT, kept_directory, say

from millrace_ui.curves.chart import chart
from millrace_ui.curves.curve_lines import Line

Result = dict[str, Any]

RESULTS = ROOT / "studies" / "results"
"""Results that go with the repository: tables and plots can be made of them without training."""
IMAGES = ROOT / "docs" / "images"
INK = "svg { color: #24292f } @media (prefers-color-scheme: dark) { svg { color: #d0d7de } }"
"""The colour of a chart's texts in a file, which has no page around it."""


def directory(study: str) -> Path:
    """Where a study keeps what it makes. With `--quick` a new place, that goes with this process."""
    path = kept_directory() / study
    path.mkdir(parents=True, exist_ok=True)
    return path


class Results:
    """A JSON file for each result, in a directory. The name of a result says all of its settings."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def get(self, name: str) -> Result | None:
        file = self.path / f"{name}.json"
        return json.loads(file.read_text()) if file.exists() else None

    def put(self, name: str, result: Result) -> None:
        partial = self.path / f".{name}.{os.getpid()}"
        partial.write_text(json.dumps(result))
        partial.replace(self.path / f"{name}.json")

    def complete(self, jobs: Mapping[str, Callable[[], Result]], *, at_once: int = 1) -> dict[str, Result]:
        """Make those that are missing, in their order, so many at once. A line on stderr for each.

        An interrupt ends it. What was made by then is kept. Each gets `cpu_s`: the processor time of child
        processes that ended meanwhile, which are its own if one is made at once.
        """
        missing = {name: make for name, make in jobs.items() if self.get(name) is None}
        began, num_made = time.monotonic(), 0
        with ThreadPoolExecutor(at_once) as pool:
            making = [pool.submit(self._make, name, make) for name, make in missing.items()]
            try:
                for done in as_completed(making):
                    name, took_s = done.result()
                    num_made += 1
                    left = (time.monotonic() - began) / num_made * (len(missing) - num_made)
                    count = f"{len(jobs) - len(missing) + num_made} of {len(jobs)}"
                    say(f"{name}: {took_s:.0f} s; {count}, {left / 60:.0f} minutes left")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return self.all(jobs)

    def all(self, names: Sequence[str] | Mapping[str, Any]) -> dict[str, Result]:
        """Those that are kept."""
        return {name: result for name in names if (result := self.get(name)) is not None}

    def _make(self, name: str, make: Callable[[], Result]) -> tuple[str, float]:
        began, used_s = time.monotonic(), cpu_s()
        result = make()
        self.put(name, result | {"cpu_s": round(cpu_s() - used_s, 1)})
        return name, time.monotonic() - began


def cpu_s() -> float:
    """Processor time of child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def save_chart(
    path: Path, title: str, lines: Sequence[Line], x: tuple[float, float], *, x_label: str
) -> None:
    """A chart as an SVG file that is legible on a light page and on a dark one."""
    drawn = chart(title, lines, x, x_label=x_label, alone=True)
    opening, rest = drawn.split(">", 1)
    path.write_text(f"{opening}><style>{INK}</style>{rest}\n")


def write_tables(document: Path, script: str, text: str) -> None:
    """Put tables into `document`, in place of those that `script` wrote before."""
    begin, end = f"<!-- studies/{script} --write -->\n", "<!-- end -->\n"
    before, _, rest = document.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    document.write_text(f"{before}{begin}{text}\n{end}{after}", encoding="utf-8")
