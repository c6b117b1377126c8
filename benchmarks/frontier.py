"""All presets in four worlds at 64, 1,024 and 8,192 GPUs: throughput, staleness, fairness, time to reward.

    python benchmarks/frontier.py [--gpus 64 1024 8192] [--worlds 4] [--rivals NAME ...] [--seeds 1]
                                  [--jobs 1] [--picture FILE] [--json]

The real controller in the simulator. `millrace` runs under several bounds, and its best throughput at each
staleness makes a curve (`learning_model.Curve`). Each rival runs under its own bound and under 4. A ratio
above 1 says that `millrace` is faster at the staleness of the rival. `millrace` with one redundant trajectory
a group and one redundant group is a second curve. It is compared with the rivals that have redundancy too.
The picture has the largest of the clusters. Runs are kept: a later call makes only those that are missing.
Larger clusters are simulated in part: devices and batch by the same factor.

worst_over_rival_at_equal_staleness  least over rivals, of the mean over worlds, sizes and seeds
over_RIVAL                           that mean for each rival
least_over_RIVAL                     its least world
time_to_reward_over_RIVAL            mean over the same of theirs over ours
redundant_..._RIVAL                  the last three, of `millrace` with redundancy
num_dominated                        points of `millrace` that a rival beats in speed, staleness and fairness
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean, geometric_mean
from types import MappingProxyType
from typing import Any, NamedTuple

from common import kept_directory, parser_of, report, say, sized, table
from frontier_picture import picture
from learning_model import Curve, Point, steps_factor

from millrace.config.tables.schedules import Millrace, Schedule
from millrace.config.tables.training import BatchShape
from millrace_sim.compare import PRESETS
from millrace_sim.config import ClusterSection, LogNormalLengths, SimulatedConfig, WorkloadSection
from millrace_sim.measure import measure
from millrace_sim.pool import process_pool
from millrace_sim.setup import scenario

GROUP, STEPS = 16, sized(24, 4)
BOUNDS = sized((0, 1, 2, 4, 6), (1, 2))
"""Of `millrace`, without and with redundancy."""
PLAIN, REDUNDANT = "millrace", "redundant millrace"
KINDS = {**PRESETS, REDUNDANT: Millrace(redundant_samples=1, redundant_groups=1)}
"""With as much redundancy as `roll_flash` has by default."""
RIVAL_BOUND = sized(4, 2)
BOUND_KEYS = "staleness_max", "eta", "lag", "alpha", "acceptance_staleness"
"""The key of a preset that is its staleness bound."""


class World(NamedTuple):
    """`model` on replicas of `tensor` devices. `trainer`: share of the devices. Lengths are log-normal."""

    model: str
    tensor: int
    trainer: float = 0.5
    shared: float = 0.0
    workload: Mapping[str, Any] = MappingProxyType({"prompt_tokens": (512, 2048), "max_tokens": 16_384})
    median: float = 1_600.0
    p99: float = 16_000.0
    mtbf_s: float | None = None
    part: int = 1
    """Simulated at a further 1 / `part`: turns take long to simulate."""


AGENT: dict[str, Any] = {
    "prompt_tokens": (512, 2048),
    "max_tokens": 8_192,
    "turns": (2, 5),
    "tool_s": (4.0, 80.0),
}
WORLDS = {
    "32B, independent lengths": World("Qwen2.5-32B", 4),
    "7B, half of the variance shared": World("Qwen2.5-7B", 1, shared=0.5),
    "7B, agents of 2 to 5 turns": World("Qwen2.5-7B", 1, workload=AGENT, median=600.0, p99=4_000.0, part=2),
    "7B, replicas fail every two hours": World("Qwen2.5-7B", 1, mtbf_s=7_200.0),
}
WORLDS = sized(WORLDS, dict(list(WORLDS.items())[:1]))


class Size(NamedTuple):
    """Prompts of a batch; devices and batch are simulated at 1 / `shrink`."""

    prompts: int
    shrink: int


SIZES = {64: Size(32, 1), 1024: Size(512, 8), 8192: Size(2048, 32)}


class Run(NamedTuple):
    """One simulated run of the preset `name` under `bound` (None: its own)."""

    world: str
    gpus: int
    name: str
    bound: int | None
    seed: int

    @property
    def file(self) -> str:
        words = self.world, self.gpus, self.name, self.bound, STEPS, self.seed
        return "_".join(str(word).replace(" ", "-").replace(",", "") for word in words) + ".json"

    @property
    def schedule(self) -> Schedule:
        preset = KINDS[self.name]
        key = _bound_key(preset)
        return preset if key is None else preset.model_copy(update={key: self.bound})

    @property
    def config(self) -> SimulatedConfig:
        world, size = WORLDS[self.world], SIZES[self.gpus]
        shrink = size.shrink * world.part
        devices = self.gpus // shrink
        trainer = int(devices * world.trainer) // world.tensor * world.tensor
        return SimulatedConfig(
            steps=STEPS,
            seed=self.seed,
            batch=BatchShape(prompts=size.prompts // shrink, group_size=GROUP),
            schedule=self.schedule,
            cluster=ClusterSection(
                model=world.model,
                device="H800",
                trainer_devices=trainer,
                model_parallel=world.tensor,
                replicas=(devices - trainer) // world.tensor,
                tensor_parallel=world.tensor,
                slots=64,
                replica_mtbf_s=world.mtbf_s,
            ),
            lengths=LogNormalLengths(median=world.median, p99=world.p99, shared=world.shared),
            workload=WorkloadSection(**world.workload),
        )


RIVALS = [name for name in PRESETS if name != PLAIN]


def _bound_key(preset: Schedule) -> str | None:
    return next((key for key in BOUND_KEYS if key in type(preset).model_fields), None)


def _bounds(name: str) -> list[int | None]:
    """Of a rival: its own, and that of the others if it has a key for it."""
    preset = PRESETS[name]
    key = _bound_key(preset)
    return [None] if key is None else [*{getattr(preset, key): None, RIVAL_BOUND: None}]


def runs(worlds: list[str], gpus: list[int], rivals: list[str], seeds: int) -> Iterator[Run]:
    """Small clusters first, and all of a seed before the next one."""
    for seed in range(seeds):
        for size in gpus:
            for world in worlds:
                yield from (Run(world, size, n, bound, seed) for n in (PLAIN, REDUNDANT) for bound in BOUNDS)
                yield from (Run(world, size, n, bound, seed) for n in rivals for bound in _bounds(n))


def simulate(run: Run) -> dict[str, Any]:
    result = measure(scenario(run.config))[0].as_dict()
    return {key: result[key] for key in ("trained_tokens_per_s", "step_s", "staleness_mean", "fairness")}


def complete(wanted: list[Run], store: Path, jobs: int) -> dict[Run, dict[str, Any]]:
    """Make what is missing, with a line on stderr for each; all of them by run."""
    missing = [run for run in wanted if not (store / run.file).exists()]
    with process_pool(jobs) as pool:
        for number, (run, made) in enumerate(zip(missing, pool.map(simulate, missing), strict=True), 1):
            partial = store / f".{run.file}"
            partial.write_text(json.dumps(made))
            partial.replace(store / run.file)
            say(f"{number}/{len(missing)} {run.file}")
    return {run: json.loads((store / run.file).read_text()) for run in wanted}


def point(found: dict[str, Any]) -> Point:
    return Point(found["staleness_mean"], found["trained_tokens_per_s"], found["fairness"], found["step_s"])


def compare(found: dict[Run, dict[str, Any]]) -> dict[str, Any]:
    """The figures of the docstring."""
    by_place = defaultdict[Any, dict[str, list[Point]]](dict)
    for run, made in found.items():
        by_place[run.world, run.gpus, run.seed].setdefault(run.name, []).append(point(made))
    places = [*by_place.values()]
    rivals = [name for name in places[0] if name not in (PLAIN, REDUNDANT)]
    plain = _ratios(places, PLAIN, rivals)
    redundant = _ratios(places, REDUNDANT, [name for name in rivals if _is_redundant(name)])
    points = [(own, rival) for place in places for own in place[PLAIN] for n in rivals for rival in place[n]]
    return {
        "worst_over_rival_at_equal_staleness": min(plain[f"over_{name}"] for name in rivals),
        **plain,
        **{f"redundant_{key}": value for key, value in redundant.items()},
        "num_dominated": sum(rival.dominates(own) for own, rival in points),
    }


def _is_redundant(name: str) -> bool:
    return "redundant_samples" in type(PRESETS[name]).model_fields


def _ratios(places: list[dict[str, list[Point]]], mine: str, rivals: list[str]) -> dict[str, float]:
    """Throughput of `mine` at equal staleness over each rival's, and the rival's time to reward over ours."""
    ratios = dict[str, float]()
    for name in rivals:
        throughput, to_reward = list[float](), list[float]()
        for place in places:
            curve, best_s = Curve(place[mine]), min(_to_reward_s(p) for p in place[mine])
            throughput.append(min(curve.at(p.staleness) / p.tokens_per_s for p in place[name]))
            to_reward.append(min(_to_reward_s(p) for p in place[name]) / best_s)
        ratios[f"over_{name}"] = geometric_mean(throughput)
        ratios[f"least_over_{name}"] = min(throughput)
        ratios[f"time_to_reward_over_{name}"] = geometric_mean(to_reward)
    return ratios


def _to_reward_s(point: Point) -> float:
    return point.step_s * steps_factor(point)


def tell(found: dict[Run, dict[str, Any]]) -> None:
    """A table for each world and size: means over seeds."""
    places = dict.fromkeys((run.world, run.gpus) for run in found)
    for world, gpus in places:
        rows = defaultdict[str, list[Point]](list)
        for run, made in found.items():
            if (run.world, run.gpus) == (world, gpus):
                rows[run.name if run.bound is None else f"{run.name} {run.bound}"].append(point(made))
        print(f"\n{world}, {gpus:,} GPUs")
        table({name: _row(points) for name, points in rows.items()})


def _row(points: list[Point]) -> dict[str, float | None]:
    known = [p.fairness for p in points if p.fairness is not None]
    return {
        "tokens/s": fmean(p.tokens_per_s for p in points),
        "staleness": fmean(p.staleness for p in points),
        "fairness": fmean(known) if known else None,
        "step_s": fmean(p.step_s for p in points),
        "to reward": fmean(_to_reward_s(p) for p in points),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", choices=tuple(SIZES), default=sized([*SIZES], [64]))
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, default=RIVALS, help="only these presets")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="simulations at once")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="SVG: throughput over staleness")
    parser.add_argument("--worlds", type=int, default=len(WORLDS), help="only the first of them")
    options = parser.parse_args()
    sizes, num_worlds, rivals = options.gpus, options.worlds, options.rivals
    found = simulated(sizes, seeds=options.seeds, jobs=options.jobs, num_worlds=num_worlds, rivals=rivals)
    if options.picture is not None:
        picture(options.picture, _panels(found, max(sizes)), (PLAIN, REDUNDANT))
    report(frontier(found), as_json=options.json)


def simulated(
    gpus: list[int], *, seeds: int, jobs: int, num_worlds: int = len(WORLDS), rivals: list[str] = RIVALS
) -> dict[Run, dict[str, Any]]:
    store = kept_directory() / "frontier"
    store.mkdir(exist_ok=True)
    return complete([*runs([*WORLDS][:num_worlds], gpus, rivals, seeds)], store, jobs)


def frontier(found: dict[Run, dict[str, Any]]) -> dict[str, Any]:
    """The figures of the docstring. Prints the tables."""
    tell(found)
    return compare(found)


def _panels(found: dict[Run, dict[str, Any]], gpus: int) -> dict[str, dict[str, list[Point]]]:
    """Points by label, by world. Presets without redundancy share a label."""
    panels = defaultdict[str, dict[str, list[Point]]](dict)
    for run, made in found.items():
        if run.gpus == gpus:
            known = run.name in (PLAIN, REDUNDANT) or _is_redundant(run.name)
            panels[run.world].setdefault(run.name if known else "other presets", []).append(point(made))
    return panels


if __name__ == "__main__":
    main()
