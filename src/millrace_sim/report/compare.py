"""Compares schedules on the same workload: means over seeds, with confidence intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from statistics import fmean, stdev

from millrace.config.tables.schedules import (
    RLAX,
    AReaL,
    Heddle,
    Laminar,
    LlamaRL,
    Millrace,
    RLBoost,
    RollFlash,
    RollPacker,
    Schedule,
    StaleFlow,
    StreamRL,
    Synchronous,
)
from millrace.core.errors import ConfigError
from millrace.estimates.interval import t_975
from millrace_sim.pool import process_pool
from millrace_sim.report.measure import Result, Timeline, measure
from millrace_sim.simulation import Scenario

PRESETS: dict[str, Schedule] = {
    "synchronous": Synchronous(),
    "llamarl": LlamaRL(),
    "areal": AReaL(),
    "laminar": Laminar(),
    "millrace": Millrace(),
    "rlax": RLAX(reload_staleness=1, acceptance_staleness=4),
    "rlboost": RLBoost(),
    "roll_flash": RollFlash(),
    "rollpacker": RollPacker(),
    "streamrl": StreamRL(),
    "staleflow": StaleFlow(),
    "heddle": Heddle(),
}
"""Presets with their default keys, except `rlax`: its default is on-policy, so it gets the bound of the
others."""

QUANTITIES = (
    "step_s",
    "trained_tokens_per_s",
    "trainer_busy",
    "replica_busy",
    "kv_used",
    "staleness_mean",
)

OF_BATCHES = ("fairness", "next")
"""Quantities that a run with few steps, or with equal lengths, lacks (`core.fairness`)."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and half the width of its 95 % confidence interval (0 for one seed: unknown)."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        n = len(values)
        if n < 2:
            return cls(fmean(values), 0.0)
        return cls(fmean(values), t_975(n - 1) * stdev(values) / sqrt(n))


@dataclass(frozen=True, slots=True)
class ComparisonProgress:
    """The progress of run `run` of `runs`. A run in another process reports only its end, with 0 events."""

    schedule: str
    seed: int
    run: int
    runs: int
    version: int
    steps: int
    virtual_s: float
    num_events: int = 0

    @property
    def share(self) -> float:
        """The share of all steps of all runs, 0 to 1."""
        return (self.run - 1 + self.version / self.steps) / self.runs


OnProgress = Callable[[ComparisonProgress], None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One schedule: the result of each seed, and the timeline of the first."""

    name: str
    results: tuple[Result, ...]
    timeline: Timeline

    def estimate(self, quantity: str) -> Interval:
        return Interval.of([getattr(result, quantity) for result in self.results])

    def known(self, quantity: str) -> Interval | None:
        """The interval over the seeds that have the quantity; None: no seed has it."""
        values = [value for result in self.results if (value := getattr(result, quantity)) is not None]
        return Interval.of(values) if values else None


def schedules(names: Iterable[str]) -> dict[str, Schedule]:
    """Presets by name; `presets` stands for all of them.

    Raises: ConfigError: an unknown name.
    """
    chosen: dict[str, Schedule] = {}
    for name in names:
        if name == "presets":
            chosen |= PRESETS
        elif name in PRESETS:
            chosen[name] = PRESETS[name]
        else:
            raise ConfigError(f"no preset is called {name!r}; known: presets, {', '.join(PRESETS)}")
    return chosen


def compare(
    base: Scenario,
    names: dict[str, Schedule],
    *,
    seeds: int,
    jobs: int = 1,
    on_progress: OnProgress = lambda progress: None,
) -> list[Comparison]:
    """Run every schedule on every seed. A seed draws lengths, latencies and failures, the same for all
    schedules."""
    scenarios = [
        _scenario(base, schedule, base.seed + seed) for schedule in names.values() for seed in range(seeds)
    ]
    outcomes = list(_run(scenarios, jobs, on_progress))
    rows = (outcomes[i : i + seeds] for i in range(0, len(outcomes), seeds))
    return [
        Comparison(name, tuple(result for result, _ in row), row[0][1])
        for name, row in zip(names, rows, strict=True)
    ]


def _scenario(base: Scenario, schedule: Schedule, seed: int) -> Scenario:
    config = base.config.model_copy(update={"schedule": schedule, "seed": seed})
    return replace(base, config=config, seed=seed)


def _run(
    scenarios: Sequence[Scenario], jobs: int, on_progress: OnProgress
) -> Iterator[tuple[Result, Timeline]]:
    def report(index: int, version: int, virtual_s: float, num_events: int) -> None:
        config, seed = scenarios[index].config, scenarios[index].seed
        place = (config.schedule.kind, seed, index + 1, len(scenarios))
        on_progress(ComparisonProgress(*place, version, config.steps, virtual_s, num_events))

    if jobs == 1:
        for index, scenario in enumerate(scenarios):
            yield measure(scenario, partial(report, index))
        return
    with process_pool(jobs) as pool:
        for index, (result, timeline) in enumerate(pool.map(measure, scenarios)):
            report(index, scenarios[index].config.steps, result.virtual_s, 0)
            yield result, timeline
