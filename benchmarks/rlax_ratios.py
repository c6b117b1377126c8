"""RLAX's two claims beside the simulator: more rollout cores, and preemptions (`published/rlax.py`).

    python benchmarks/rlax_ratios.py [--seeds 5] [--json]     # fifteen minutes

scaling      fleets of 2 to 256 replicas of 4 v5p chips beside a trainer on v5p-512, same batch. Where the
             trainer computes nine tenths of the time, more replicas gain nothing: the knee
preemptions  an eighth of v5p-512 + v5p-1024, 60 steps, checkpoints every 5. The trainer, one replica of the
             fleet, or the whole run is preempted, once an hour or once in three hours on average

`rollout_scaling_8x`        generated tokens a second of 16 replicas over 2
`rollout_scaling_v5p_1024`  of v5p-1024 over v5p-128, the published pair (8.0); `step_scaling_v5p_1024` (3.6)
`goodput_under_preemption`  the fraction of an undisturbed run's trained tokens a second, where the whole run
                            is preempted once in three hours. No source tells this figure
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import Any

from common import parser_of, report, say, sized, table
from published import rlax

REPLICAS = sized([2, 4, 8, 16, 32, 64, 128, 256], [1, 8])
FIRST, EIGHTFOLD, PUBLISHED = REPLICAS[0], 8 * REPLICAS[0], sized((16, 128), (1, 8))
SIZE = sized(rlax.Size(), replace(rlax.Size(steps=3).shrunk(64), group_size=4))
DISTURBED = sized(rlax.Size(steps=60).shrunk(8), replace(SIZE, steps=6))
DISTURBED_REPLICAS = sized(16, 2)
HOUR_S = 3600.0
INTERVALS_S = sized((HOUR_S, 3 * HOUR_S), (HOUR_S,))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=sized(5, 1))
    options = parser.parse_args()
    fleets, preempted = scaling(), preemptions(options.seeds)
    headline = preempted[f"run, {INTERVALS_S[-1] / HOUR_S:g} h"]
    result = {
        **{name: row["generated"] for name, row in fleets.items()},
        "rollout_scaling_8x": ratio(fleets, FIRST, EIGHTFOLD, "generated"),
        "rollout_scaling_v5p_1024": ratio(fleets, *PUBLISHED, "generated"),
        "step_scaling_v5p_1024": 1.0 / ratio(fleets, *PUBLISHED, "step_s"),
        "knee_cores": next((name for name, row in fleets.items() if row["trainer_busy"] >= rlax.BOUND), None),
        "goodput_under_preemption": headline["goodput"],
        "goodput": {name: row["goodput"] for name, row in preempted.items()},
    }
    report(result, as_json=options.json)


def scaling() -> dict[str, dict[str, float]]:
    rows = {}
    for count in REPLICAS:
        result = rlax.scaled(SIZE, count)
        rows[name_of(count)] = {
            "generated": result.generated_tokens_per_s,
            "trained": result.trained_tokens_per_s,
            "step_s": result.step_s,
            "trainer_busy": result.trainer_busy,
            "replica_busy": result.replica_busy,
            "staleness": result.staleness_mean,
        }
        say(f"{name_of(count)}: {rows[name_of(count)]}")
    table(rows)
    return rows


def preemptions(seeds: int) -> dict[str, dict[str, Any]]:
    rows = {}
    for kind in rlax.KINDS:
        for interval_s in INTERVALS_S:
            runs = [
                rlax.disturbed(DISTURBED, DISTURBED_REPLICAS, kind, interval_s, seed=seed)
                for seed in range(seeds)
            ]
            rows[f"{kind}, {interval_s / HOUR_S:g} h"] = {
                "goodput": fmean(run.goodput for run in runs),
                "least": min(run.goodput for run in runs),
                "preemptions": fmean(run.preemptions for run in runs),
                "replayed": fmean(run.replayed for run in runs),
                "hours": fmean(run.wall_s for run in runs) / HOUR_S,
            }
            say(f"{kind}, {interval_s / HOUR_S:g} h: {runs}")
    table(rows)
    return rows


def name_of(replicas: int) -> str:
    return f"v5p-{rlax.cores(replicas)}"


def ratio(fleets: dict[str, dict[str, float]], few: int, many: int, figure: str) -> float:
    return fleets[name_of(many)][figure] / fleets[name_of(few)][figure]


if __name__ == "__main__":
    main()
