"""What staleness costs, at three sizes, without and with each correction: runs, tables and plots.

    python studies/staleness.py                                # or: make study-staleness
    python studies/staleness.py --sizes 0.8m --seeds 2         # a part; a later call completes it
    python studies/staleness.py --minutes 90 --workers 2       # begins no run after 90 minutes
    python studies/staleness.py --sizes 135m --model runs/real/model    # SmolLM2, which `make real` imports

Each finished run is a line of studies/results/staleness.json, and no run is made twice. So the same command
goes on after an interruption, and a finished study prints its tables and writes its plots in seconds. Rewards
by step do not depend on speed: other programs may run beside it. reports/staleness.md has what was found.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import study
from common import QUICK, parser_of, report, say, sized
from staleness_design import CORRECTIONS, RUN_S, SIZES, Run, num_wanted, wanted
from staleness_results import StalenessResults
from staleness_runs import DESIGN, make
from staleness_tables import figures, plots, tables, write_page


class Progress:
    """A line on stderr for each finished run, with a forecast of the time that is left."""

    def __init__(self, results: StalenessResults, total: Mapping[str, int], workers: int) -> None:
        self._results, self._total, self._workers = results, total, workers
        self._wall_s: dict[str, list[float]] = {size: [] for size in total}

    def ended(self, run: Run, wall_s: float) -> None:
        self._wall_s[run.size].append(wall_s)
        say(f"{run.name}: {wall_s:.0f} s; {self.left()}")

    def left(self) -> str:
        made = {size: sum(run.size == size for run in self._results.runs) for size in self._total}
        missing = {size: max(0, self._total[size] - made[size]) for size in self._total}
        left_s = sum(num * self._run_s(size) for size, num in missing.items()) / self._workers
        return f"{sum(missing.values())} runs left, about {left_s / 3600:.1f} hours"

    def _run_s(self, size: str) -> float:
        own = self._wall_s[size] or [run["cpu_s"] for run in self._results.of_size(size)] or [RUN_S[size]]
        return sum(own) / len(own)


def complete(results: StalenessResults, options: Any, seeds: Sequence[int]) -> None:
    """Make what is missing. Ends when nothing is, when `--minutes` are over, or by an interrupt."""
    total = {size: num_wanted(size, seeds, options.arms) for size in options.sizes}
    progress, began_s = Progress(results, total, options.workers), time.monotonic()
    say(progress.left())
    starts = study.directory("staleness")
    running: dict[Future[dict[str, Any]], tuple[Run, float]] = {}
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        while True:
            taken = {run for run, _ in running.values()} | results.runs.keys()
            missing = (
                run for run in wanted(options.sizes, seeds, options.arms, results.rewards) if run not in taken
            )
            while len(running) < options.workers and time.monotonic() - began_s < 60 * options.minutes:
                if (run := next(missing, None)) is None:
                    break
                running[pool.submit(make, run, starts, options.model)] = run, time.monotonic()
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                run, from_s = running.pop(future)
                results.add(run, future.result())
                progress.ended(run, time.monotonic() - from_s)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--model", type=Path, help="the directory of SmolLM2-135M-Instruct, for size 135m")
    parser.add_argument("--seeds", type=int, default=sized(5, 1))
    parser.add_argument(
        "--arms", nargs="+", default=sized(list(CORRECTIONS), ["none", "tis"]), choices=CORRECTIONS
    )
    parser.add_argument("--workers", type=int, default=1, help="runs at the same time, each on one core")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so many")
    parser.add_argument("--results", type=Path, default=None, metavar="FILE")
    options = parser.parse_args()
    if options.model is None:
        options.sizes = [size for size in options.sizes if not SIZES[size].real]
    file = options.results or (study.directory("staleness") if QUICK else study.RESULTS) / "staleness.json"
    results = StalenessResults(file, DESIGN)
    complete(results, options, range(options.seeds))
    lines = tables(results) + plots(results, study.directory("staleness") if QUICK else study.IMAGES)
    print("\n".join(lines))
    if not QUICK:
        write_page(study.ROOT / "reports" / "staleness.md", lines)
    report(figures(results), as_json=options.json)


if __name__ == "__main__":
    main()
