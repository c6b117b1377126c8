"""Effective training time under failures, beside RobustRL and ByteRobust (`published/robustrl.py`).

    python benchmarks/goodput.py [--seeds 5] [--again] [--json]     # ten minutes

injection  one death of the trainer in every 10 steps, on 256 simulated devices. Three systems in one world:
           this controller with RobustRL's published times, with times assumed for Millrace, and a job that
           restarts whole and knows what its last checkpoint knew, with ByteRobust's published times.
           Once with steps so short that the first has RobustRL's ETTR, and once with long steps
roles      the same number of deaths of another role
storms     a tenth, half and nine tenths of the replicas go at one moment
intervals  steps between checkpoints, at two rates of failures, beside the optimum of `millrace plan`
rates      Llama 3's rate on 256, 1,024 and 8,192 devices: computed from what one death costs above

`ettr` is RobustRL's measure. `goodput` is the time of the same steps without a failure or a checkpoint, as a
fraction: what is done again counts as lost, and a wait that hides a failure as nothing. Finished runs are
kept, so that a call that was interrupted goes on; `--again` begins anew.

`ettr_10pct`          the goal is 0.90; published 0.80 (RobustRL) and 0.60 (ByteRobust)
`ettr_10pct_standby`  the same with `trainer.standby`, which is off by default
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

from common import kept_directory, parser_of, report, say, sized, table
from published import robustrl
from published.robustrl import Measured, Size, System

from millrace_sim.costs.hardware import DEVICE_MTBF_H
from millrace_sim.plan.ranking import CheckpointCosts, best_interval
from millrace_sim.virtual.faults import Faults

FULL = Size(steps=20)
"""Five seeds together have as many faults as the paper's 100 steps."""
SIZE = sized(FULL, replace(FULL, machines=4, prompts=4, steps=11, median=300.0, p99=600.0, max_tokens=2000))
LONG = sized(replace(FULL, median=robustrl.LONG_MEDIAN, p99=8 * robustrl.LONG_MEDIAN), SIZE)
SMALL = sized(replace(FULL.shrunk(8), steps=60), SIZE)
"""The load of a device stays what it is: for the intervals, which take many failures."""

PROCESS_S = 10.0
"""A trainer's process: fork with imports, a CUDA context. Assumed."""
NCCL_S = 50.0
"""Communicators of 64 A100s from nothing (TrainMover, OSDI '26, arXiv:2412.12636). Here for 128 devices."""
COMPILE_S = 12.0
"""The first step compiles for so long (measured here on one H200)."""
LOAD_S = 4.0
"""115 GB in 16 hosts, each at 2 GB/s (`millrace_sim/costs/cluster.py`: assumed)."""
MILLRACE = System(trainer_s=PROCESS_S + NCCL_S + COMPILE_S + LOAD_S, stall_s=1.0, save_s=LOAD_S)
STANDBY = robustrl.StandbySystem(**asdict(MILLRACE), remains_s=COMPILE_S + LOAD_S)
"""`trainer.standby`: the real controller hands over. The seconds are assumed, as above."""
PUBLISHED = System()
SYSTEMS = {
    "this controller, RobustRL's times": PUBLISHED,
    "this controller, times assumed for Millrace": MILLRACE,
    "whole job, ByteRobust's times": robustrl.BYTEROBUST,
    "with `trainer.standby`, times assumed for Millrace": STANDBY,
}
OWN = "this controller, times assumed for Millrace"
WITH_STANDBY = "with `trainer.standby`, times assumed for Millrace"
ROLES = ("replica", "relay", "reward worker", "controller")
SHARES = sized((0.1, 0.5, 0.9), (0.5,))
EVERY = sized((1, 2, 4, 8), (1, 4))
MTBF_STEPS = sized((10, 40), (10,))
DEVICES = (256, 1024, 8192)
KEPT = "goodput.jsonl"


class Runs:
    """Finished runs by name, in a file."""

    def __init__(self, *, again: bool) -> None:
        self._path = kept_directory() / KEPT
        if again:
            self._path.unlink(missing_ok=True)
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self._done = dict(json.loads(line) for line in lines)

    def of(self, size: Size, system: System, faults: Faults, seed: int) -> Measured:
        name = repr((size, system, faults, seed))
        if name not in self._done:
            one = robustrl.run(size, system, faults, seed=seed).as_dict()
            self._done[name] = one
            with self._path.open("a") as file:
                file.write(json.dumps([name, one]) + "\n")
        return Measured(**self._done[name])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=sized(5, 1))
    parser.add_argument("--again", action="store_true", help="forget finished runs")
    options = parser.parse_args()
    runs, seeds = Runs(again=options.again), range(options.seeds)
    injected = injection(runs, SIZE, seeds)
    long = injection(runs, LONG, range(1))
    result = {
        "ettr_10pct": injected[OWN]["ettr"],
        "ettr_10pct_standby": injected[WITH_STANDBY]["ettr"],
        "goodput_10pct": injected[OWN]["goodput"],
        "ettr_10pct_published_times": injected["this controller, RobustRL's times"]["ettr"],
        "ettr_10pct_whole_job": injected["whole job, ByteRobust's times"]["ettr"],
        "ettr_10pct_long_steps": long[OWN]["ettr"],
        "injection": injected,
        "long_steps": long,
        "roles": roles(runs),
        "storms": storms(runs),
        "intervals": intervals(runs, seeds[:1]),
        "rates": rates(injected),
    }
    report(result, as_json=options.json)


def calm(runs: Runs, size: Size, seed: int) -> Measured:
    """Without failures, and without checkpoints but the last."""
    return runs.of(size, System(every=size.steps + 1), Faults(), seed)


def row(ones: list[Measured], calms: list[Measured], role: str) -> dict[str, Any]:
    recovery = robustrl.recovery(ones, role)
    return {
        "ettr": fmean(one.ettr for one in ones),
        "least": min(one.ettr for one in ones),
        "goodput": fmean(quiet.wall_s / one.wall_s for one, quiet in zip(ones, calms, strict=True)),
        "deaths": fmean(one.deaths for one in ones),
        "median s": recovery and recovery[0],
        "worst s": recovery and recovery[1],
        "steps again": fmean(one.again for one in ones),
        "tokens again": fmean(
            one.generated / quiet.generated - 1 for one, quiet in zip(ones, calms, strict=True)
        ),
        "stalled": fmean(one.stalled_s / one.wall_s for one in ones),
    }


def injection(runs: Runs, size: Size, seeds: range) -> dict[str, dict[str, Any]]:
    rows, calms = {}, [calm(runs, size, seed) for seed in seeds]
    waited = fmean(one.waited_s / one.wall_s for one in calms)
    say(f"undisturbed: a step takes {calms[0].step_s:.1f} s, the trainer waits {waited:.0%}")
    for name, system in SYSTEMS.items():
        faults = [every_ten(size, "trainer", system, quiet, seed) for seed, quiet in enumerate(calms)]
        ones = [runs.of(size, system, faults[seed], seed) for seed in seeds]
        rows[name] = row(ones, calms, "trainer")
        say(f"{name}: {rows[name]}")
    table(rows)
    return rows


def every_ten(size: Size, role: str, system: System, quiet: Measured, seed: int) -> Faults:
    return robustrl.injected(size, role, quiet.step_s, whole_job=system.whole_job, seed=seed)


def roles(runs: Runs) -> dict[str, dict[str, Any]]:
    """The time to recover is the trainer's where the controller dies, and with it every worker."""
    quiet, rows = calm(runs, SIZE, 0), {}
    for role in ROLES:
        one = runs.of(SIZE, MILLRACE, every_ten(SIZE, role, MILLRACE, quiet, 0), 0)
        rows[role] = row([one], [quiet], "trainer" if role == "controller" else role)
    table(rows)
    return rows


def storms(runs: Runs) -> dict[str, dict[str, Any]]:
    """Beside the same run without the storm, which has its checkpoints too."""
    still, rows = runs.of(SIZE, MILLRACE, Faults(), 0), {}
    for share in SHARES:
        one = runs.of(SIZE, MILLRACE, robustrl.storm(SIZE, share, SIZE.steps // 3, still.step_s / 2), 0)
        rows[f"{share:.0%} of the replicas"] = {
            "ettr": one.ettr,
            "longer by s": one.wall_s - still.wall_s,
            "tokens again": one.generated / still.generated - 1,
            "median s": (robustrl.recovery([one], "replica") or (0.0,))[0],
        }
    table(rows)
    return rows


def intervals(runs: Runs, seeds: range) -> dict[str, dict[str, Any]]:
    """With RobustRL's stall of 3 s, the deaths of the trainer at exponential times."""
    rows: dict[str, dict[str, Any]] = {}
    for mtbf_steps in MTBF_STEPS:
        quiet = [calm(runs, SMALL, seed) for seed in seeds]
        step_s = fmean(one.step_s for one in quiet)
        mtbf_s = mtbf_steps * step_s
        busy_s = fmean(1 - one.waited_s / one.wall_s for one in quiet) * step_s
        costs = CheckpointCosts(step_s, busy_s, robustrl.STALL_S, robustrl.SAVE_S)
        best = best_interval(costs, mtbf_s)
        for every in EVERY:
            system = replace(PUBLISHED, every=every)
            faults = [robustrl.exponential(SMALL, mtbf_steps, step_s, seed) for seed in seeds]
            ones = [runs.of(SMALL, system, faults[seed], seed) for seed in seeds]
            rows[f"a death in {mtbf_steps} steps, saved every {every}"] = {
                **row(ones, quiet, "trainer"),
                "loss by formula": costs.loss(every, mtbf_s),
                "best by formula": best.every,
                "Young's s": (2 * robustrl.STALL_S * mtbf_s) ** 0.5,
            }
    table(rows)
    return rows


def rates(injected: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Hours lie between two deaths, so these rows are computed: deaths an hour, times the time of each."""
    trainer_s = injected[OWN]["median s"] or 0.0
    job_s = injected["whole job, ByteRobust's times"]["median s"] or 0.0
    rows = {}
    for devices in DEVICES:
        per_s = devices / (DEVICE_MTBF_H * 3600)
        costs = CheckpointCosts(STEP_S, STEP_S / 2, MILLRACE.stall_s, MILLRACE.save_s)
        best = best_interval(costs, 2 / per_s)
        trainers = per_s / 2 * trainer_s / 2
        replicas = per_s / 2 * robustrl.REPLICA_S * 8 / devices
        rows[f"{devices:,} devices"] = {
            "hours between": 1 / per_s / 3600,
            "saved every": best.every,
            "ettr": 1 - trainers - replicas - best.loss / 2,
            "whole job": 1 - per_s * job_s - best.loss,
        }
    table(rows)
    return rows


STEP_S = 45.0
"""A step of the undisturbed run on 256 devices, rounded. A larger cluster has a larger batch."""


if __name__ == "__main__":
    main()
