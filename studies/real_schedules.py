"""Sums of two numbers under four schedules and with an adapter: SmolLM2-135M-Instruct, three seeds each.

    .venv-real/bin/python studies/real_schedules.py --model runs/real/model [--write]

Each run is one of `millrace train examples/real/arithmetic.toml` in bfloat16. Its rewards by step, its greedy
accuracies on held-out rows and its checks are kept in studies/results/real_schedules, and no run is made
twice. Rewards by step hardly depend on speed: other programs may run beside it. `--write` puts the table and
the chart into reports/results.md.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import study
from common import median

import millrace
from millrace.quickstart.checks import checks_of_accounts
from millrace.run_directory.run_directory import RunDirectory
from millrace_ui.curves.curve_lines import Line, smoothed

FILE = study.ROOT / "examples" / "real" / "arithmetic.toml"
BOUND = 2
ARMS = {
    "synchronous": ['schedule={kind="synchronous"}'],
    "llamarl": [f'schedule={{kind="llamarl",lag={BOUND}}}'],
    "rlax": [f'schedule={{kind="rlax",acceptance_staleness={BOUND}}}'],
    "laminar": [f'schedule={{kind="laminar",staleness_max={BOUND}}}'],
    "adapter": [f'schedule={{kind="laminar",staleness_max={BOUND}}}', "adapter.rank=16", "optimizer.lr=1e-4"],
}
"""What each sets beside the file. `adapter` is a LoRA adapter under `laminar`."""
GAP_MAX = 1.0
"""Most that a token's log-prob may differ between replica and trainer, in nats, in bfloat16."""
SMOOTHING = 0.8


def trained(arm: str, seed: int, model: Path, directory: Path) -> study.Result:
    """One run, from its start: what an interrupted call left is dropped."""
    run = directory / f"{arm}-{seed}"
    shutil.rmtree(run, ignore_errors=True)
    sets = [f"model.path={model.resolve()}", "model.dtype=bfloat16", f"seed={seed}", *ARMS[arm]]
    words = [*(word for value in sets for word in ("--set", value)), "--run-dir", str(run)]
    log = run.with_suffix(".log")
    with log.open("wb") as file:
        command = [sys.executable, "-m", "millrace", "train", str(FILE), *words]
        if subprocess.run(command, stdout=file, stderr=file, check=False).returncode:
            raise SystemExit(log.read_text())
    found = summary(run)
    shutil.rmtree(run)  # its checkpoints and the trained model are 2 GB
    return found


def summary(run: Path) -> study.Result:
    record = millrace.Run(run)
    steps = record.metrics()
    return {
        "rewards": [round(step["reward/mean"], 4) for step in steps],
        "staleness": round(sum(step["staleness/mean"] for step in steps) / len(steps), 3),
        "greedy": [(one["version"], one["greedy"]) for one in record.evaluations()],
        "gap": record.summary()["logprob_gap_staleness0"],
        "checks": {check.claim: check.holds for check in checks_of_accounts(RunDirectory(run), GAP_MAX)},
    }


def table(results: Sequence[tuple[str, list[study.Result]]]) -> str:
    """Of each arm: medians over its seeds, and the values of single seeds in brackets."""
    lines = [
        "| run | seeds | mean staleness | reward, steps 1 to 8 | last 8 | greedy before | after |",
        "|" + "---|" * 7,
    ]
    for arm, runs in results:
        first = [float(np.mean(run["rewards"][:8])) for run in runs]
        last = [float(np.mean(run["rewards"][-8:])) for run in runs]
        before, after = ([run["greedy"][place][1] for run in runs] for place in (0, -1))
        cells = (
            _shown(values) for values in ([run["staleness"] for run in runs], first, last, before, after)
        )
        lines.append(f"| {arm} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({', '.join(f'{value:.2f}' for value in sorted(values))})"


def lines(results: Sequence[tuple[str, list[study.Result]]]) -> list[Line]:
    """The reward of each batch, smoothed: the mean over seeds, with the range of the seeds as a band."""
    drawn = []
    for arm, runs in results:
        y = np.array([smoothed(run["rewards"], SMOOTHING) for run in runs])
        x = np.arange(1, y.shape[1] + 1, dtype=float)
        drawn.append(Line(arm, x, y.mean(0), low=y.min(0), high=y.max(0)))
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="an imported model")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    kept = study.Results(study.RESULTS / "real_schedules")
    jobs = {
        f"{arm}-{seed}": partial(trained, arm, seed, options.model, study.directory("real"))
        for seed in range(1, options.seeds + 1)
        for arm in options.arms
    }
    if options.model is not None:
        kept.complete(jobs)
    made = kept.all(jobs)
    results = [
        (arm, runs)
        for arm in options.arms
        if (runs := [made[n] for n in made if n.rpartition("-")[0] == arm])
    ]
    text = table(results)
    print(text)
    if options.write:
        drawn = lines(results)
        study.save_chart(
            study.IMAGES / "real-schedules.svg",
            "reward of a batch, sums of two numbers",
            drawn,
            (1.0, max(float(line.x[-1]) for line in drawn)),
            x_label="version",
        )
        study.write_tables(study.ROOT / "reports" / "results.md", Path(__file__).name, text)


if __name__ == "__main__":
    main()
