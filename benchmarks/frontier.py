"""Throughput against staleness and fairness: every preset under several bounds, at 1024 simulated GPUs.

    python benchmarks/frontier.py --picture docs/images/frontier.svg --json    # about 25 minutes of one core
    python benchmarks/frontier.py --seeds 1 --worlds 1

The worlds are those of `policies.py`, the first and the one with 7B, each with completions whose lengths are
independent, and with lengths of which half of the variance belongs to the prompt. No schedule is told a
length. `before` is `millrace` with no limit but its bound, and the first ready groups first: fast and unfair.

A point is dominated if another preset's is at least as fast, as young and as fair, and better in one of the
three by more than the noise: 3 % of throughput, 0.1 of staleness, 0.3 of fairness (its distance from 1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from multiprocessing import Pool
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from common import QUICK, parser_of, report, say, sized, table
from policies import FIRST_SEED, WORLDS, Job, World, run

from millrace.config.schema import Config
from millrace.config.tables import schedules
from millrace.schedule import Schedule, presets
from millrace.schedule.take import FirstReady
from millrace.sim.report.measure import Result

PLACES = tuple((world, shared) for world in (WORLDS[0], WORLDS[4]) for shared in (0.0, 0.5))
BOUNDS = sized((1, 2, 4, 6), (1, 2))
NOISE = 0.03, 0.1, 0.3  # of throughput (relative), of staleness, of fairness
OURS, BEFORE = "millrace", "before"
COLORS = {
    "synchronous": "#777777",
    "llamarl": "#56b4e9",
    "areal": "#e69f00",
    "laminar": "#009e73",
    "rlax": "#8c564b",
    BEFORE: "#cc79a7",
    OURS: "#d55e00",
}


def before(config: Config) -> Schedule:
    bound = config.schedule.staleness_max
    own = schedules.Millrace(staleness_max=bound, ahead=max(1, bound))
    made = presets.build(config.model_copy(update={"schedule": own}))
    return replace(made, take_rule=FirstReady())


def settings_of(world: World) -> list[tuple[str, int, schedules.Schedule]]:
    """(preset, its bound, schedule). Laminar has the knobs that win most often in `policies.py`."""
    share, path = 512 // world.replicas, f"{Path(__file__).resolve()}:before"
    found: list[tuple[str, int, schedules.Schedule]] = [("synchronous", 0, schedules.Synchronous())]
    for n in BOUNDS:
        knobs = {"round_groups": 2 * share, "batch_max": world.slots // 3}
        found += [
            ("llamarl", n, schedules.LlamaRL(lag=n)),
            ("areal", n, schedules.AReaL(eta=n)),
            ("laminar", n, schedules.Laminar(staleness_max=n, **knobs)),
            ("rlax", n, schedules.RLAX(reload_staleness=1, acceptance_staleness=n)),
            (BEFORE, n, schedules.FunctionSchedule(path=path, staleness_max=n)),
            (OURS, n, schedules.Millrace(staleness_max=n)),
        ]
    return found


@dataclass(frozen=True)
class Point:
    """Means over seeds."""

    preset: str
    bound: int
    tokens_per_s: float
    staleness: float
    fairness: float

    @classmethod
    def of(cls, preset: str, bound: int, rows: list[Result]) -> Point:
        fair = [row.fairness for row in rows if row.fairness is not None]
        return cls(
            preset,
            bound,
            fmean(row.trained_tokens_per_s for row in rows),
            fmean(row.staleness_mean for row in rows),
            fmean(fair) if fair else 1.0,
        )

    @property
    def unfairness(self) -> float:
        return abs(self.fairness - 1)

    def dominates(self, other: Point) -> bool:
        gains = (
            self.tokens_per_s / other.tokens_per_s - 1,
            other.staleness - self.staleness,
            other.unfairness - self.unfairness,
        )
        return all(gain >= 0 for gain in gains) and any(g > n for g, n in zip(gains, NOISE, strict=True))


def gains(points: list[Point], other: str) -> list[tuple[float, float]]:
    """For each point of a preset within the staleness of ours: (throughput of ours at its staleness, over its
    own; its staleness less that of ours at its throughput). Between our points lies a straight line."""
    ours = sorted((p for p in points if p.preset == OURS), key=lambda p: p.staleness)
    ages, speeds = [p.staleness for p in ours], [p.tokens_per_s for p in ours]
    monotone = list(np.maximum.accumulate(speeds))
    found = []
    for p in points:
        if p.preset == other and ages[0] <= p.staleness <= ages[-1]:
            speed = float(np.interp(p.staleness, ages, speeds)) / p.tokens_per_s
            found.append((speed, p.staleness - float(np.interp(p.tokens_per_s, monotone, ages))))
    return found


# ---------------------------------------------------------------- runs


Places = dict[str, list[Point]]


def points(seeds: int, worlds: int, processes: int) -> Places:
    named: dict[tuple[str, str, int], list[Job]] = {}
    for world, shared in PLACES[: 2 * worlds]:
        place = f"{world.name}, {'half of the variance shared' if shared else 'independent lengths'}"
        for preset, bound, schedule in settings_of(world):
            named[place, preset, bound] = [
                Job(world, preset, schedule, FIRST_SEED + seed, lengths_shared=shared)
                for seed in range(seeds)
            ]
    found: Places = {}
    with Pool(processes, maxtasksperchild=4) as pool:
        results = pool.imap(run, (job for jobs in named.values() for job in jobs))
        for (place, preset, bound), jobs in named.items():
            point = Point.of(preset, bound, [next(results)[1] for _ in jobs])
            found.setdefault(place, []).append(point)
            say(f"{place}: {_line(point)}")
    return found


def _line(p: Point) -> str:
    return (
        f"{p.preset} {p.bound}  {p.tokens_per_s / 1000:.1f} k tokens/s  "
        f"staleness {p.staleness:.2f}  fair {p.fairness:.2f}"
    )


def draw(places: Places, path: Path) -> None:
    """A panel for each place; a point's size says how unfair its batches are."""
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "frontier", "svg.fonttype": "none", "font.size": 11})
    height = -(-len(places) // 2)
    plot, grid = plt.subplots(height, 2, figsize=(12, 4.6 * height), squeeze=False)
    panels = list(grid.flat)
    for panel, (place, found) in zip(panels, places.items(), strict=True):
        for preset, color in COLORS.items():
            own = sorted((p for p in found if p.preset == preset), key=lambda p: p.bound)
            x, y = [p.staleness for p in own], [p.tokens_per_s / 1000 for p in own]
            panel.plot(x, y, color=color, linewidth=2 if preset == OURS else 1, zorder=2)
            sizes = [30 + 120 * min(p.unfairness, 3) for p in own]
            panel.scatter(x, y, s=sizes, color=color, alpha=0.7, label=preset, zorder=3)
            for p in own:
                place_at = (p.staleness, p.tokens_per_s / 1000)
                panel.annotate(str(p.bound), place_at, textcoords="offset points", xytext=(5, 5), fontsize=8)
        panel.set(title=place, xlabel="mean staleness of trained tokens (versions)")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("trained tokens a second, thousands")
    panels[-1].legend(loc="lower right", fontsize=9, markerscale=0.6)
    plot.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    plot.savefig(path, metadata={"Date": None})


def _as_json(places: Places) -> dict[str, Any]:
    """`over_...`: throughput of ours over that preset's at equal staleness: the mean of its points."""
    others = (BEFORE, "laminar")
    compared = {other: {place: gains(p, other) for place, p in places.items()} for other in others}
    pairs = {other: [pair for found in compared[other].values() for pair in found] for other in others}
    dominated = [
        f"{place}: {OURS} {own.bound} by {other.preset} {other.bound}"
        for place, found in places.items()
        for own in found
        for other in found
        if own.preset == OURS and other.preset not in (OURS, BEFORE) and other.dominates(own)
    ]
    return {
        "points": {place: [vars(point) for point in found] for place, found in places.items()},
        "gains": compared,
        "dominated": dominated,
        "num_dominated": len(dominated),
        **{f"over_{other}": fmean(speed for speed, _ in found) for other, found in pairs.items() if found},
        "younger_than_before": fmean(age for _, age in pairs[BEFORE]) if pairs[BEFORE] else None,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=sized(2, 1))
    parser.add_argument("--worlds", type=int, default=sized(2, 1), choices=(1, 2))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--picture", type=Path, default=None, help="draw it into this file (.svg, .png)")
    options = parser.parse_args()
    places = points(options.seeds, options.worlds, options.processes)
    for place, found in places.items():
        print(f"\n{place}")
        rows = {f"{p.preset} {p.bound}": p for p in found}
        keys = {"tokens/s": "tokens_per_s", "staleness": "staleness", "fairness": "fairness"}
        table({name: {title: getattr(p, key) for title, key in keys.items()} for name, p in rows.items()})
    if options.picture and not QUICK:
        draw(places, options.picture)
    report(_as_json(places), as_json=options.json)


if __name__ == "__main__":
    main()
