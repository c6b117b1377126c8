"""Schedules in the simulator, on a fleet that stays and on one that changes all the time.

    python benchmarks/spot.py --json
    python benchmarks/spot.py --seeds 1

A run of 60 steps with 4 replicas. On the changing fleet somebody asks for 1 to 7 replicas every 4 to 20 s.
The same seed changes it in the same way for every schedule. `wall_s` is virtual time, the mean over seeds.
"""

from __future__ import annotations

import random
from statistics import fmean

from common import parser_of, report, sized

from millrace.config.tables.schedules import Laminar, Millrace, RLBoost, Schedule, Synchronous
from millrace.config.tables.training import BatchShape
from millrace.sim.costs.interface import Costs
from millrace.sim.costs.lengths import LogNormal
from millrace.sim.costs.workload import Workload
from millrace.sim.explore.worlds import small_config
from millrace.sim.simulation import Outcome, Scaling, Scenario, simulate

SCHEDULES: tuple[Schedule, ...] = (RLBoost(), Millrace(), Laminar(), Synchronous())
CHANGES = 60


def changes(seed: int) -> tuple[Scaling, ...]:
    rng, at_s, asked = random.Random(seed), 0.0, list[Scaling]()
    for _ in range(CHANGES):
        at_s += rng.uniform(4, 20)
        asked.append(Scaling(at_s, rng.randint(1, 7)))
    return tuple(asked)


def played(schedule: Schedule, seed: int, *, changing: bool) -> Outcome:
    shape = BatchShape(prompts=8, group_size=3)
    config = small_config(schedule, steps=sized(60, 6), replicas=4, seed=seed, batch=shape)
    workload = Workload(completion=LogNormal(60.0, 0.8))
    scalings = changes(seed) if changing else ()
    return simulate(
        Scenario(config, seed=seed, costs=Costs(step_base_s=0.5), workload=workload, scalings=scalings)
    )


def figures(schedule: Schedule, seeds: int) -> dict[str, float]:
    found = {}
    for name in ("stays", "changes"):
        outcomes = [played(schedule, seed, changing=name == "changes") for seed in range(seeds)]
        found[f"{name}_wall_s"] = fmean(outcome.wall_s for outcome in outcomes)
        steps = [step["staleness_mean"] for outcome in outcomes for step in outcome.of("step")]
        found[f"{name}_staleness"] = fmean(steps)
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=sized(5, 1))
    asked = parser.parse_args()
    report({schedule.kind: figures(schedule, asked.seeds) for schedule in SCHEDULES}, as_json=asked.json)


if __name__ == "__main__":
    main()
