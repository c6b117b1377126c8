"""Fresh and fair: schedules under one staleness bound against each other, and ours against TRL's trainers.

    python benchmarks/freshness.py --json                       # all of it, 5 seeds, interleaved
    python benchmarks/freshness.py --parts default --seeds 2    # a part; a later call completes it

Parts, each on the short and the uneven task of `loop_vs_trl.py`:

    default           its configuration: 128 slots, so that a batch and more is decoded at once
    generation-bound  8 slots, on the uneven task 4: a decode step serves few trajectories, and the trainer
                      waits for them
    trainer-bound     micro-batches of 64 tokens: the same gradient, at over twice the trainer's time; on the
                      uneven task also activations computed again and a KL penalty to a reference model
    balanced          the uneven task with micro-batches of 64 tokens: no side is the slower one
    peers             GRPOTrainer and AsyncGRPOTrainer, in the default configuration

`waits` of the synchronous schedule says which side is the slower one: 0.6 and more, generation is; 0.4 and
less, the trainer is. Speed needs a machine with nothing else on it. Finished runs are kept, so a later call
makes only what is missing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common import kept_directory, median, parser_of, report, sized, table
from loop_vs_trl import SCRIPTS, STALENESS_MAX, time_ratio
from stored_runs import Kept, Spec, Store, interval, plus_minus

STEPS = {"short": sized(120, 4), "uneven": sized(72, 4)}
PEERS, BALANCED = "peers", "balanced"
RECOMPUTING = {"recompute": "true", "kl": 0.001}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "default": {"short": {}, "uneven": {}},
    "generation-bound": {"short": {"slots": 8}, "uneven": {"slots": 4}},
    "trainer-bound": {"short": {"token_budget": 64}, "uneven": {"token_budget": 64, **RECOMPUTING}},
    BALANCED: {"uneven": {"token_budget": 64}},
}
"""Name -> task -> what it changes in `loop_vs_trl.OURS`. All but the first make two thirds of the steps."""
OURS, BASE = "millrace", "synchronous"


def schedules(bound: int) -> dict[str, str]:
    return {
        OURS: f'{{ kind = "millrace", staleness_max = {bound}, repack_interval_s = 0.5 }}',
        "laminar": f'{{ kind = "laminar", staleness_max = {bound}, repack_interval_s = 0.5 }}',
        "areal": f'{{ kind = "areal", eta = {bound} }}',
        BASE: '{ kind = "synchronous" }',
    }


Place = tuple[str, str]
"""(task, setting)"""
Runs = dict[tuple[str, int], Kept]
"""(schedule or peer, seed) -> run."""


def specs(options: argparse.Namespace) -> list[Spec]:
    """All schedules of a task and setting, then the next of these, then the next seed."""
    found = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for task in options.tasks.split(","):
            for part in options.parts.split(","):
                steps = STEPS[task]
                found += _part(task, part, seed, steps, options.bound)
    names = options.names and options.names.split(",")
    return [spec for spec in found if not names or spec.name in names]


def _part(task: str, part: str, seed: int, steps: int, bound: int) -> list[Spec]:
    if part == PEERS:
        return [Spec(task, name, seed, steps) for name in SCRIPTS]
    if task not in SETTINGS[part]:
        return []
    steps = steps if part == "default" else steps * 2 // 3
    setting, changes = _setting(part, bound), SETTINGS[part][task]
    return [
        Spec(task, name, seed, steps, setting, {"schedule": schedule, **changes})
        for name, schedule in schedules(bound).items()
    ]


def _setting(part: str, bound: int) -> str:
    return part if bound == STALENESS_MAX else f"{part} bound {bound}"


# ---------------------------------------------------------------- figures


def rows(runs: Runs) -> dict[str, dict[str, Any]]:
    """A schedule's means over seeds; of peers, speed and reward are known."""
    found = {}
    for name in dict.fromkeys(name for name, _ in runs):
        own = [run for (who, _), run in runs.items() if who == name]
        row: dict[str, Any] = {
            "tokens/s": median([run.tokens_per_s for run in own]),
            "reward": plus_minus([_mean(run.rewards) for run in own]),
        }
        if name not in SCRIPTS:
            row |= {
                "staleness": _mean([run.staleness_mean for run in own]),
                "waits": _mean([run.trainer_waits for run in own]),
                "fairness": plus_minus([run.fairness for run in own], 2),
                "next": _mean([run.next for run in own]),
            }
        found[name] = row
    return found


def throughput_kept(runs: Runs) -> float | None:
    """Our median speed over that of the fastest other schedule. Seeds that not all have are left out."""
    speeds = {name: [run.tokens_per_s for run in own] for name, own in _aligned(runs).items()}
    others = [median(values) for name, values in speeds.items() if name != OURS]
    return median(speeds[OURS]) / max(others) if OURS in speeds and others else None


def reward_gap(runs: Runs) -> tuple[float, float | None] | None:
    """Mean reward over all steps, synchronous minus ours within a seed: mean, half width of its interval."""
    gaps = [
        _mean(runs[BASE, seed].rewards) - _mean(run.rewards)
        for (name, seed), run in runs.items()
        if name == OURS and (BASE, seed) in runs
    ]
    return interval(gaps) if gaps else None


def time_to_reward(runs: Runs) -> float | None:
    """Seconds to reward of the better peer over ours: the median over seeds; None: mostly not reached."""
    ratios = []
    for seed in dict.fromkeys(seed for _, seed in runs):
        curves = {name: runs[name, seed].curve for name in (OURS, *SCRIPTS) if (name, seed) in runs}
        if len(curves) == 1 + len(SCRIPTS):
            ratios.append(time_ratio(curves))
    reached = [ratio for ratio in ratios if ratio is not None]
    return median(reached) if 2 * len(reached) > len(ratios) else None


def _aligned(runs: Runs) -> dict[str, list[Kept]]:
    """The runs of our schedules, of those seeds that all of them have."""
    names = list(dict.fromkeys(name for name, _ in runs if name not in SCRIPTS))
    seeds = [s for s in dict.fromkeys(seed for _, seed in runs) if all((n, s) in runs for n in names)]
    return {name: [runs[name, seed] for seed in seeds] for name in names if seeds}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _own(runs: Runs, what: str) -> list[float]:
    return [getattr(run, what) for (name, _), run in runs.items() if name == OURS]


def figures(places: dict[Place, Runs]) -> dict[str, float | None]:
    """The worst over tasks and settings of each figure, after all of them by name; without `balanced`, where
    no side is the slower one.

    Of fairness, the worst is the one that is the furthest from 1, as a ratio."""
    found: dict[str, dict[str, float | None]] = {}
    for (task, setting), runs in places.items():
        if not (staleness := _own(runs, "staleness_mean")):
            continue
        gap = reward_gap(runs)
        found[f"{task} {setting}"] = {
            "staleness_mean": _mean(staleness),
            "fairness": _mean(_own(runs, "fairness")),
            "throughput_kept": throughput_kept(runs),
            "reward_gap_to_synchronous": gap and gap[0],
            "reward_gap_half_width": gap and gap[1],
            "time_to_reward_over_best_peer": time_to_reward(runs),
        }
    named = {f"{place} {name}": value for place, one in found.items() for name, value in one.items()}
    worst = {
        "staleness_mean": max,
        "fairness": lambda values: max(values, key=lambda value: max(value, 1 / max(value, 1e-9))),
        "throughput_kept": min,
        "reward_gap_to_synchronous": max,
        "time_to_reward_over_best_peer": min,
    }
    bound = [one for place, one in found.items() if BALANCED not in place]
    told = {name: [v for one in bound if (v := one[name]) is not None] for name in worst}
    return named | {name: pick(told[name]) if told[name] else None for name, pick in worst.items()}


def gathered(kept: dict[Spec, Kept], bound: int) -> dict[Place, Runs]:
    """Peers belong to the default setting, whatever the bound of our schedules."""
    places: dict[Place, Runs] = {}
    for spec, run in kept.items():
        setting = _setting("default", bound) if spec.name in SCRIPTS else spec.setting
        places.setdefault((spec.task, setting), {})[spec.name, spec.seed] = run
    return places


def main() -> None:
    options = _options()
    store, wanted = Store(options.store or kept_directory() / "freshness"), specs(options)
    if not options.no_runs:
        store.complete(wanted)
    kept = store.all(wanted)
    places = gathered(kept, options.bound)
    for (task, setting), runs in places.items():
        print(f"\n{task}, {setting}: {len({seed for _, seed in runs})} seeds, intervals of 95 %")
        table(rows(runs))
    if kept:
        loads = [run.load for run in kept.values()]
        print(f"\nload average at the end of a run: {min(loads):.1f} to {max(loads):.1f}")
    report(figures(places), as_json=options.json)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=sized(5, 1))
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--tasks", default=sized("short,uneven", "short"))
    parser.add_argument("--parts", default=sized(",".join([*SETTINGS, PEERS]), "default"))
    parser.add_argument(
        "--names", default=sized(None, f"{OURS},{BASE}"), help="only these schedules and peers"
    )
    parser.add_argument("--bound", type=int, default=STALENESS_MAX, help="staleness bound of all schedules")
    parser.add_argument("--store", type=Path, default=None, help="directory of finished runs")
    parser.add_argument("--no-runs", action="store_true", help="tell what is kept, make nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
