"""Compares schedules on the same workload: means over seeds, with confidence intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from millrace.config.load import validate
from millrace.config.schema import Config
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
from millrace.config.tables.section import Section
from millrace.core.errors import ConfigError
from millrace.estimates.interval import t_975
from millrace_sim.calibrate.learn import calibrate
from millrace_sim.config import SimulatedConfig
from millrace_sim.measure import Result, Timeline, measure
from millrace_sim.pool import process_pool
from millrace_sim.setup import check_memory, scenario
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


def base_scenario(config: Section | None, run: Path | None, seed: int | None) -> Scenario:
    """The scenario of `config`. With `run`, its lengths and costs, and by default its configuration."""
    if run is not None:
        calibration = calibrate(run)
        next_run = config if isinstance(config, Config) else calibration.config
        return calibration.scenario(next_run, seed=next_run.seed if seed is None else seed)
    if not isinstance(config, SimulatedConfig):
        raise ConfigError(
            "name a configuration, or a run to take lengths and costs from: --from RUN, in Python run=RUN"
        )
    check_memory(config)
    return scenario(config, seed=seed)


def compared(
    base: Scenario,
    names: Sequence[str],
    *,
    seeds: int,
    jobs: int,
    on_progress: OnProgress = lambda progress: None,
) -> list[Comparison]:
    """The named presets, or the configuration's own schedule, on the same seeds."""
    own: dict[str, Schedule] = {base.config.schedule.kind: base.config.schedule}
    return compare(base, schedules(names) if names else own, seeds=seeds, jobs=jobs, on_progress=on_progress)


def compared_records(
    config: dict[str, Any] | None, run: str | None, names: list[str], seeds: int, seed: int | None, jobs: int
) -> list[dict[str, Any]]:
    """A flat record per schedule and seed: what `millrace.simulate` answers."""
    schema: type[Section] = SimulatedConfig if run is None else Config
    checked = None if config is None else validate(schema, config, {})
    base = base_scenario(checked, Path(run) if run else None, seed)
    return [
        {"schedule": comparison.name, "seed": base.seed + index, **result.as_dict()}
        for comparison in compared(base, names, seeds=seeds, jobs=jobs)
        for index, result in enumerate(comparison.results)
    ]


BUSY = 0.9
"""A side that works for this share of the time, or more, counts as always busy."""


def verdict(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Sentences: the fastest schedule, the certainty of that, and its bottleneck."""
    ranked = sorted(comparisons, key=_speed, reverse=True)
    best = ranked[0]
    rate = best.estimate("trained_tokens_per_s")
    stale = best.estimate("staleness_mean").mean
    trained = f"{rate.mean:,.0f} tokens/s at a mean staleness of {stale:.2f}"
    if len(ranked) == 1:
        yield f"`{best.name}` trains {trained}."
    else:
        second = ranked[1]
        gain, other = rate.mean / max(_speed(second), 1e-9) - 1, second.estimate("trained_tokens_per_s")
        yield f"`{best.name}` is the fastest: {trained}, {gain:.1%} more tokens/s than `{second.name}`."
        if not rate.half_width:
            yield "One seed each: how sure the order is cannot be said; --seeds 5 tells."
        elif rate.mean - rate.half_width < other.mean + other.half_width:
            yield "Their 95 % intervals overlap: the two may as well be equal."
    yield _bottleneck(best)
    waits, answer = best.known("episode_waits"), best.known("answer_s")
    if waits is not None and answer is not None:
        trainer, replicas = best.estimate("trainer_waits").mean, 1 - best.estimate("replica_busy").mean
        yield (
            f"An answer of the environment takes {answer.mean:,.2g} s. Waiting: episodes {waits.mean:.0%} of "
            f"their time, the trainer {trainer:.0%}, replicas {replicas:.0%}."
        )


def _speed(comparison: Comparison) -> float:
    return comparison.estimate("trained_tokens_per_s").mean


def _bottleneck(best: Comparison) -> str:
    trainer, replicas = best.estimate("trainer_busy").mean, best.estimate("replica_busy").mean
    if trainer >= BUSY > replicas:
        return f"The trainer is the slower side (busy {trainer:.0%}; replicas {replicas:.0%})."
    if replicas >= BUSY > trainer:
        return f"Generation is the slower side (replicas busy {replicas:.0%}; trainer {trainer:.0%})."
    if min(trainer, replicas) >= BUSY:
        return f"Both sides are busy (trainer {trainer:.0%}, replicas {replicas:.0%}): they are in balance."
    return f"Both sides wait at times (trainer busy {trainer:.0%}, replicas {replicas:.0%})."
