"""Laminar's policy against `millrace` in the simulator: Laminar's workload at 1024 GPUs (arXiv:2510.12633).

    python benchmarks/policies.py             # worlds x policies x seeds, then the ablation; about 10 minutes
    python benchmarks/policies.py --json --seeds 1

Qwen2.5 on 1024 H800: 512 prompts x 16 a step, 2k in, up to 16k out, p99 = 10 x median. A world is simulated
with an eighth or a quarter of everything (replicas, trainer devices, prompts), so that policies see replicas
and groups in the same proportion. All but one run under one bound. Laminar's own knobs (rounds and its
limit B, of the decode batch or of repack alone) are tuned in every world, and `millrace_over_laminar` is
against its best. `millrace`'s one number was chosen on the first four worlds, seeds below `FIRST_SEED`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import hypot, prod
from multiprocessing import Pool
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from common import parser_of, say, sized

from millrace.config.schema import Config
from millrace.config.tables import schedules
from millrace.config.tables.training import BatchShape
from millrace.schedule import RepackOrder, Schedule, View, presets
from millrace.schedule.admit import KVRoom
from millrace.schedule.deadlines import groups_room
from millrace.schedule.repack import BestFit
from millrace.schedule.repack_demand import PACKED_MAX, replicas_wanted
from millrace.schedule.take import FirstReady
from millrace.sim.config import ClusterSection, LogNormalLengths, SimulatedConfig, WorkloadSection
from millrace.sim.costs.cluster import ClusterCosts
from millrace.sim.report.measure import Result, measure
from millrace.sim.setup import scenario
from millrace.sim.simulation import Scenario

BOUND = 4
STEPS = sized(40, 3)
YOUNGER = "millrace, bound 6"
"""Its mean staleness is below that of the others at their bound of 4: it runs at most 3.5 batches ahead."""
FIRST_SEED = 100
PROMPT_TOKENS = 2048
OWN = f"{Path(__file__).resolve()}:"


@dataclass(frozen=True)
class World:
    """`shrunk`: the 1024 GPUs are this many times what is simulated. `slots`: trajectories that a replica
    runs; 160 is what its KV holds at usual lengths (paged), 46 what it holds at the longest (reserved)."""

    name: str
    model: str
    tensor_parallel: int
    replicas: int
    trainer_devices: int
    shrunk: int
    slots: int = 160


WORLDS = (
    World("32B, 512 train + 512 generate", "Qwen2.5-32B", 4, 128, 512, 8),
    World("32B, 768 train + 256 generate", "Qwen2.5-32B", 4, 64, 768, 4),
    World("72B, 512 train + 512 generate", "Qwen2.5-72B", 8, 64, 512, 4),
    World("32B, 512 + 512, KV reserved", "Qwen2.5-32B", 4, 128, 512, 8, slots=46),
    World("7B, 640 train + 384 generate", "Qwen2.5-7B", 2, 192, 640, 8),
)


def policies(world: World) -> dict[str, schedules.Schedule]:
    """Name -> schedule. `laminar ...` are its knobs; the first is what it derives."""
    share = 512 // world.replicas
    found: dict[str, schedules.Schedule] = {
        "laminar": schedules.Laminar(staleness_max=BOUND),
        "areal": schedules.AReaL(eta=BOUND),
        "millrace": schedules.Millrace(staleness_max=BOUND),
        YOUNGER: schedules.Millrace(staleness_max=BOUND + 2),
    }
    for rounds, limit in ((share, world.slots // 3), (2 * share, world.slots // 2)):
        knobs = schedules.Laminar(staleness_max=BOUND, round_groups=rounds, batch_max=limit)
        found[f"laminar, rounds of {rounds}, B {limit}"] = knobs
    for count, function in ((1, "one_round"), (2, "two_rounds")):
        own = schedules.FunctionSchedule(path=OWN + function, staleness_max=BOUND)
        found[f"laminar, rounds of {count * share}, repack to {PACKED_MAX}"] = own
    found["millrace, moved whole"] = schedules.FunctionSchedule(path=OWN + "whole", staleness_max=BOUND)
    return found


def one_round(config: Config) -> Schedule:
    return _laminar(config, 1)


def two_rounds(config: Config) -> Schedule:
    return _laminar(config, 2)


def _laminar(config: Config, shares: int) -> Schedule:
    """Laminar with its B for repack alone, at the value that suits `millrace`."""
    share = -(-config.batch.prompts // config.rollout.replicas)
    repack = BestFit(5.0, 0.9, PACKED_MAX)
    return presets.laminar(staleness_max=BOUND, round_groups=shares * share, batch_max=None, repack=repack)


def whole(config: Config) -> Schedule:
    """`millrace`, but all that a replica has goes to one other."""
    return replace(presets.build(_millrace(config)), repack_rule=_Whole())


@dataclass(frozen=True)
class _Whole:
    interval_s: float = 5.0

    def moves(self, view: View) -> list[RepackOrder]:
        wanted = replicas_wanted(view, groups_room(view, BOUND))
        behind = {r.replica_id: r for r in view.replicas if r.serving and r.version < view.newest and r.load}
        load = {name: replica.load for name, replica in behind.items()}
        moves: list[RepackOrder] = []
        received = set[str]()
        for source in sorted(behind, key=lambda name: behind[name].load):
            num = load.pop(source)
            fits = [
                name
                for name, other in behind.items()
                if name in load
                and other.version == behind[source].version
                and load[name] + num <= min(PACKED_MAX, other.slots)
            ]
            if len(moves) < wanted and fits and source not in received:
                best = min(fits, key=lambda name: load[name])
                load[best] += num
                received.add(best)
                moves.append(RepackOrder(source, {best: num}))
            else:
                load[source] = num
        return moves

    def describe(self) -> str:
        return "as many whole replicas as are wanted, each onto the emptiest other that takes it"


ABLATION = ("rounds", "best_fit", "half", "densest", "first_ready", "no_repack", "just_in_time")
"""Functions below: `millrace` with one answer taken back, or one idea added that did not help."""


def rounds(config: Config) -> Schedule:
    """Laminar's admission: rounds, each begun on an empty replica."""
    share = -(-config.batch.prompts // config.rollout.replicas)
    return replace(presets.build(_millrace(config)), admit_rule=KVRoom(2 * share))


def best_fit(config: Config) -> Schedule:
    """Laminar's repack, within the same limit."""
    return replace(presets.build(_millrace(config)), repack_rule=BestFit(5.0, 0.9, PACKED_MAX))


def half(config: Config) -> Schedule:
    """On demand, but up to half of the slots of a destination."""
    knobs = schedules.Millrace(staleness_max=BOUND, batch_max=config.rollout.slots // 2)
    return presets.build(config.model_copy(update={"schedule": knobs}))


def densest(config: Config) -> Schedule:
    """On demand, but up to all slots of a destination."""
    knobs = schedules.Millrace(staleness_max=BOUND, batch_max=config.rollout.slots)
    return presets.build(config.model_copy(update={"schedule": knobs}))


def first_ready(config: Config) -> Schedule:
    return replace(presets.build(_millrace(config)), take_rule=FirstReady())


def no_repack(config: Config) -> Schedule:
    return replace(presets.build(_millrace(config)), repack_rule=None)


def just_in_time(config: Config) -> Schedule:
    """No new group while a batch and more is ready: fresher, if generation is ahead."""
    made = presets.build(_millrace(config))
    return replace(made, admit_rule=_JustInTime(made.admit_rule))


@dataclass(frozen=True)
class _JustInTime:
    inner: Any

    def room(self, view: Any, replica: Any) -> int:
        ready = sum(group.ready for group in view.groups)
        return 0 if ready >= view.batch_groups else int(self.inner.room(view, replica))

    def describe(self) -> str:
        return "only while less than a batch is ready"


def _millrace(config: Config) -> Config:
    return config.model_copy(update={"schedule": schedules.Millrace(staleness_max=BOUND)})


# ---------------------------------------------------------------- runs


Results = dict[tuple[str, str], list[Result]]
"""(world, policy) -> one for each seed."""
Ratios = dict[str, tuple[float, float, str]]
"""World -> throughput over Laminar's best, its standard error over seeds, and which knobs those are."""


@dataclass(frozen=True)
class Job:
    world: World
    policy: str
    schedule: schedules.Schedule
    seed: int
    free_moves: bool = False  # KV travels with a moved trajectory and costs nothing
    lengths_shared: float = 0.0  # of the variance of lengths, by the completions of a prompt


def run(job: Job) -> tuple[Job, Result]:
    result, _ = measure(_scenario(job))
    return job, result


def _scenario(job: Job) -> Scenario:
    world = job.world
    config = SimulatedConfig(
        steps=STEPS,
        seed=job.seed,
        batch=BatchShape(prompts=sized(512, 64) // world.shrunk, group_size=16),
        schedule=job.schedule,
        cluster=ClusterSection(
            model=world.model,
            device="H800",
            trainer_devices=world.trainer_devices // world.shrunk,
            model_parallel=8,
            replicas=world.replicas // world.shrunk,
            tensor_parallel=world.tensor_parallel,
            slots=world.slots,
        ),
        lengths=LogNormalLengths(median=1640, p99=16_400, shared=job.lengths_shared),
        workload=WorkloadSection(prompt_tokens=(PROMPT_TOKENS, PROMPT_TOKENS), max_tokens=16_384),
    )
    made = scenario(config)
    made = replace(made, scale=replace(made.scale, kv_capacity_tokens=None))
    if job.free_moves:
        assert isinstance(made.costs, ClusterCosts)
        made = replace(made, costs=FreeMoves(made.costs.cluster, made.costs.quantum))
    return made


@dataclass(frozen=True)
class FreeMoves(ClusterCosts):
    """KV goes with a trajectory that moves, in no time: only prompts are computed."""

    def prefill_s(self, tokens: int, context: int) -> float:
        return super().prefill_s(min(tokens, PROMPT_TOKENS // self.quantum), context)


def _jobs(seeds: int) -> Iterable[Job]:
    for world in WORLDS:
        for name, schedule in policies(world).items():
            for seed in range(FIRST_SEED, FIRST_SEED + seeds):
                yield Job(world, name, schedule, seed)


def _ablation(seeds: int) -> Iterable[Job]:
    for name in ABLATION:
        for seed in range(FIRST_SEED, FIRST_SEED + seeds):
            yield Job(WORLDS[0], name, schedules.FunctionSchedule(path=OWN + name, staleness_max=BOUND), seed)
    for name in ("laminar", "millrace"):
        for seed in range(FIRST_SEED, FIRST_SEED + seeds):
            free = f"{name}, KV moves for nothing"
            yield Job(WORLDS[0], free, policies(WORLDS[0])[name], seed, free_moves=True)


def millrace_over_laminar(seeds: int = 1, processes: int = 2) -> float:
    """The geometric mean over worlds of throughput over that of Laminar's best knobs, at the same bound."""
    jobs = [j for j in _jobs(seeds) if j.policy == YOUNGER or j.policy.startswith("laminar")]
    results = _results(jobs, processes)
    return _headline({world.name: _ratio(world, results) for world in WORLDS})


def _headline(ratios: Ratios) -> float:
    return prod(ratio for ratio, _, _ in ratios.values()) ** (1 / len(ratios))


def _results(jobs: list[Job], processes: int) -> Results:
    """A line on stderr for each policy that is done."""
    results: Results = {}
    due = Counter((job.world.name, job.policy) for job in jobs)
    with Pool(processes, maxtasksperchild=4) as pool:
        for job, result in pool.imap(run, jobs):
            place = job.world.name, job.policy
            rows = results.setdefault(place, [])
            rows.append(result)
            if len(rows) == due[place]:
                say(_line(*place, rows))
    return results


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=sized(3, 1))
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    results = _results([*_jobs(arguments.seeds), *_ablation(arguments.seeds)], arguments.processes)
    ratios = {world.name: _ratio(world, results) for world in WORLDS}
    headline = _headline(ratios)
    for name, (ratio, noise, best) in ratios.items():
        say(f"{name:32} {YOUNGER} / {best}: {ratio:.3f} +- {noise:.3f}")
    say(f"millrace_over_laminar {headline:.3f}")
    if arguments.json:
        print(json.dumps(_as_json(results, ratios, headline)))


def _ratio(world: World, results: Results) -> tuple[float, float, str]:
    """Of mean throughputs, against Laminar's best knobs in this world; and its standard error over seeds."""
    tuned = [policy for policy in policies(world) if policy.startswith("laminar")]
    best = max(tuned, key=lambda policy: _mean(results[world.name, policy]))
    ours, theirs = results[world.name, YOUNGER], results[world.name, best]
    ratio = _mean(ours) / _mean(theirs)
    return ratio, ratio * hypot(_error(ours), _error(theirs)), best


def _error(rows: list[Result]) -> float:
    """Standard error of the mean throughput, relative to it."""
    if len(rows) < 2:
        return 0.0
    return stdev(row.trained_tokens_per_s for row in rows) / len(rows) ** 0.5 / _mean(rows)


def _mean(rows: list[Result]) -> float:
    return fmean(row.trained_tokens_per_s for row in rows)


def _line(world: str, policy: str, rows: list[Result]) -> str:
    speeds = [row.trained_tokens_per_s / 1000 for row in rows]
    spread = stdev(speeds) if len(speeds) > 1 else 0.0
    return (
        f"{world:32} {policy:30} {fmean(speeds):7.1f} +- {spread:4.1f} k tokens/s  "
        f"staleness {fmean(row.staleness_mean for row in rows):.2f}  "
        f"fair {_fairness(rows)}  "
        f"trainer waits {fmean(row.trainer_waits for row in rows):.0%}  "
        f"replicas busy {fmean(row.replica_busy for row in rows):.0%}"
    )


def _fairness(rows: list[Result]) -> str:
    """Mean and standard deviation over seeds; see `millrace.core.fairness`."""
    known = [row.fairness for row in rows if row.fairness is not None]
    spread = stdev(known) if len(known) > 1 else 0.0
    return f"{fmean(known):.2f} +- {spread:.2f}" if known else "-"


def _as_json(results: Results, ratios: Ratios, headline: float) -> dict[str, Any]:
    return {
        "runs": [
            {"world": world, "policy": policy, "seed": row.seed}
            | {"trained_tokens_per_s": row.trained_tokens_per_s, "staleness_mean": row.staleness_mean}
            | {"fairness": row.fairness, "next": row.next}
            | {"trainer_waits": row.trainer_waits, "replica_busy": row.replica_busy}
            for (world, policy), rows in results.items()
            for row in rows
        ],
        "ratios": {
            name: {"ratio": ratio, "standard_error": noise, "against": best}
            for name, (ratio, noise, best) in ratios.items()
        },
        "millrace_over_laminar": headline,
    }


if __name__ == "__main__":
    main()
