"""What staleness and unfair batches cost in reward per step. Real runs of the two tasks of `loop_vs_trl.py`.

    python benchmarks/learning.py --json                     # 5 seeds, both tasks: 60 runs
    python benchmarks/learning.py --tasks short --seeds 2    # a part; a later call completes it

Every token has the same staleness (`lockstep.py: fixed`), or rounds of two batches are trained in the order
of admission or as they become ready. Seeds choose prompts and their order, alike for all. So differences are
taken within a seed. Reward per step does not depend on speed: other programs may run beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common import kept_directory, parser_of, report, sized, table
from stored_runs import Kept, Spec, Store, interval, plus_minus

STEPS = {"short": sized(120, 5), "uneven": sized(72, 5)}
ARMS = {
    "staleness 0": ("fixed", 0),
    "staleness 1": ("fixed", 1),
    "staleness 2": ("fixed", 2),
    "staleness 4": ("fixed", 4),
    "in order": ("in_order", 2),
    "first ready": ("first_ready", 2),
}
"""Name -> function of `lockstep.py`, `schedule.staleness_max`."""
ARMS = sized(ARMS, {name: ARMS[name] for name in ("staleness 0", "staleness 1")})
AGAINST = {name: "staleness 0" for name in ARMS} | {"first ready": "in order"}
PARTS = 5

Runs = dict[tuple[str, int], Kept]
"""(arm, seed) -> run."""


def specs(tasks: Iterable[str], seeds: Iterable[int]) -> list[Spec]:
    """Interleaved: all arms of one seed, then the next seed; then the next task."""
    return [
        Spec(task, name, seed, STEPS[task], "lockstep", {"schedule": _schedule(*arm)})
        for task in tasks
        for seed in seeds
        for name, arm in ARMS.items()
    ]


def _schedule(function: str, staleness_max: int) -> str:
    return f'{{ kind = "function", path = "lockstep:{function}", staleness_max = {staleness_max} }}'


def parts(rewards: list[float]) -> list[float]:
    """Mean reward of each fifth of the steps, then of all of them."""
    size = len(rewards) // PARTS
    means = [sum(rewards[i * size : (i + 1) * size]) / size for i in range(PARTS)]
    return [*means, sum(rewards) / len(rewards)]


def levels(runs: Runs) -> dict[str, dict[str, Any]]:
    """Rows of the table of rewards: an arm's mean over seeds with its 95 % interval."""
    rows = {}
    for name in ARMS:
        own = [run for (arm, _), run in runs.items() if arm == name]
        if own:
            cells = zip(*(parts(run.rewards) for run in own), strict=True)
            rows[name] = dict(zip(_columns(), (plus_minus(cell) for cell in cells), strict=True)) | {
                "staleness": sum(run.staleness_mean for run in own) / len(own),
                "fairness": sum(run.fairness for run in own) / len(own),
                "next": sum(run.next for run in own) / len(own),
            }
    return rows


def differences(runs: Runs) -> dict[str, list[tuple[float, float | None]]]:
    """Arm -> difference to `AGAINST` within a seed: mean and half width, for each fifth and all."""
    found = {}
    for name, other in AGAINST.items():
        pairs = [(run, runs[other, seed]) for (arm, seed), run in runs.items() if arm == name]
        if name != other and pairs:
            each = [
                [a - b for a, b in zip(parts(one.rewards), parts(base.rewards), strict=True)]
                for one, base in pairs
            ]
            found[name] = [interval(cell) for cell in zip(*each, strict=True)]
    return found


def _columns() -> list[str]:
    return [*(f"fifth {i + 1}" for i in range(PARTS)), "all"]


def tell(task: str, runs: Runs) -> dict[str, float | None]:
    """Print the tables of a task; returns its figures by name."""
    seeds = len({seed for _, seed in runs})
    print(f"\n{task}: mean reward, {seeds} seeds, 95 % intervals")
    table(levels(runs))
    print(f"\n{task}: difference within a seed, to staleness 0 (first ready: to in order)")
    figures: dict[str, float | None] = {}
    rows = {}
    for name, cells in differences(runs).items():
        texts = [f"{m:+.3f}" + ("" if h is None else f" +- {h:.3f}") for m, h in cells]
        rows[name] = dict(zip(_columns(), texts, strict=True))
        for column, (mean, half) in (("last", cells[-2]), ("all", cells[-1])):
            figures[f"{task} {name} {column}"] = mean
            figures[f"{task} {name} {column} half width"] = half
    if rows:
        table(rows)
    return figures


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=sized(5, 1))
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--tasks", default=sized("uneven,short", "short"))
    parser.add_argument("--store", type=Path, default=None, help="directory of finished runs")
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    wanted = specs(options.tasks.split(","), seeds)
    store = Store(options.store or kept_directory() / "learning")
    store.complete(wanted)
    kept, figures = store.all(wanted), {}
    for task in options.tasks.split(","):
        figures |= tell(task, {(s.name, s.seed): run for s, run in kept.items() if s.task == task})
    report(figures, as_json=options.json)


if __name__ == "__main__":
    main()
