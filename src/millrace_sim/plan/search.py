"""Ranks layouts: the best predictions are simulated, then the fastest candidate is varied.

    1  the best layout of each (trainer kind, replica kind, tensor parallel, dtype), by prediction
    2  around the winner: other splits, slots, batches, schedules' rounds and repack, transports

Coordinate by coordinate, keeping what is faster; every simulation counts against the budget. A plan of more
replicas than `replicas_max` is simulated in proportion: replicas, trainer and prompts shrink together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from millrace.config.tables import schedules
from millrace.config.tables.training import BatchShape
from millrace.core.errors import ConfigError
from millrace_sim.config import ClusterSection, PlanConfig, ReplicaKind, SimulatedConfig
from millrace_sim.costs.transport import Transport
from millrace_sim.measure import Result, Timeline, measure
from millrace_sim.plan.layouts import Demand, PlanLayout, layout_generate_s, slots_that_fit, train_s
from millrace_sim.setup import scenario

FASTER = 1.01
"""A smaller factor is noise, and the earlier plan stays."""


@dataclass(frozen=True)
class Candidate:
    """A layout, and the other choices of a plan."""

    layout: PlanLayout
    prompts: int
    schedule: schedules.Schedule
    transport: Transport = "relay"

    @property
    def key(self) -> tuple[object, ...]:
        return (self.layout, self.prompts, repr(self.schedule), self.transport)


@dataclass(frozen=True)
class Simulated:
    """A candidate and its result. `tokens_per_s` is of the whole plan, not of its smaller image."""

    candidate: Candidate
    result: Result
    timeline: Timeline
    scale: int  # the plan is this many times what was simulated

    @property
    def tokens_per_s(self) -> float:
        return self.result.trained_tokens_per_s * self.scale


def search(
    config: PlanConfig,
    demand: Demand,
    layouts: Sequence[PlanLayout],
    run: Callable[[Candidate], Simulated],
    in_turns: Sequence[PlanLayout] = (),
) -> list[Simulated]:
    """Simulated candidates, the fastest first. `layouts` and the colocated ones, `in_turns`, have the best
    prediction first.

    Raises: ConfigError: nothing fits.
    """
    if not (layouts or in_turns):
        raise ConfigError("no layout of this model on these devices fits in memory: take more devices")
    budget = config.search.simulations
    tried: dict[tuple[object, ...], Simulated] = {}

    def attempt(candidate: Candidate) -> Simulated | None:
        if candidate.key not in tried and len(tried) < budget:
            tried[candidate.key] = run(candidate)
        return tried.get(candidate.key)

    best: Simulated | None = None
    first = [*list(_starts(config, layouts))[: max(1, budget // 3)], *_starts(config, in_turns)]
    for candidate in first:
        best = _faster(best, attempt(candidate))
    for moves in (_splits, _slots, _batches, _schedules, _transports):
        assert best is not None
        for candidate in moves(config, demand, best.candidate, layouts):
            best = _faster(best, attempt(candidate))
    return sorted(tried.values(), key=lambda one: -one.tokens_per_s)


def simulated_config(config: PlanConfig, candidate: Candidate) -> tuple[SimulatedConfig, int]:
    """The run to simulate, and how many times larger the plan is."""
    layout = candidate.layout
    scale = _scale(layout, candidate.prompts, config.search.replicas_max)
    training, generation = layout.training, layout.generation
    return (
        SimulatedConfig(
            steps=config.search.steps,
            seed=config.seed,
            batch=BatchShape(prompts=candidate.prompts // scale, group_size=config.batch.group_size),
            schedule=candidate.schedule,
            cluster=ClusterSection(
                model=config.model,
                device=training.device.name,
                replica_device=generation.device.name,
                trainer_devices=training.devices // scale,
                model_parallel=training.model_parallel,
                replicas=layout.replicas // scale,
                tensor_parallel=generation.tensor_parallel,
                dtype="fp8" if generation.dtype == "fp8" else "bf16",
                slots=layout.slots,
                other_replicas=_others(layout, scale),
                colocated=layout.colocated,
                transport=candidate.transport,
            ),
            lengths=config.lengths,
            workload=config.workload,
        ),
        scale,
    )


def _others(layout: PlanLayout, scale: int) -> tuple[ReplicaKind, ...]:
    """As many as are nearest to the proportion: a few must not vanish, and a single one must not count
    `scale` times."""
    other, num = layout.other, (layout.other_replicas + scale // 2) // scale
    if other is None or not num:
        return ()
    return (ReplicaKind(device=other.device.name, replicas=num, tensor_parallel=other.tensor_parallel),)


def simulate_candidate(config: PlanConfig, candidate: Candidate) -> Simulated:
    simulated, scale = simulated_config(config, candidate)
    result, timeline = measure(scenario(simulated))
    return Simulated(candidate, result, timeline, scale)


def _scale(layout: PlanLayout, prompts: int, replicas_max: int) -> int:
    """The smallest whole factor that brings the replicas within `replicas_max` and divides everything about
    evenly; the trainer's image still has to hold the model."""
    scale = 1
    while layout.replicas // (2 * scale) >= 1 and layout.replicas > replicas_max * scale:
        smaller = replace(layout.training, devices=layout.training.devices // (2 * scale))
        if prompts % (2 * scale) or smaller.devices < smaller.model_parallel or smaller.devices < 1:
            break
        if not smaller.fits(1):
            break
        scale *= 2
    return scale


# ---------------------------------------------------------------- candidates


def _starts(config: PlanConfig, layouts: Sequence[PlanLayout]) -> Iterator[Candidate]:
    seen = set()
    for layout in layouts:
        kind = (
            layout.training.device.name,
            layout.generation.device.name,
            layout.generation.tensor_parallel,
            layout.generation.dtype,
            layout.other is None,
        )
        if kind not in seen:
            seen.add(kind)
            schedule = _schedule(config, layout)
            yield Candidate(layout, config.batch.prompts[0], schedule, config.search.transports[0])


def _schedule(config: PlanConfig, layout: PlanLayout) -> schedules.Schedule:
    if config.staleness_max == 0:
        return schedules.Synchronous()
    if layout.colocated:
        return schedules.AReaL(eta=1)
    return schedules.Millrace(staleness_max=config.staleness_max)


def _splits(
    config: PlanConfig, demand: Demand, best: Candidate, layouts: Sequence[PlanLayout]
) -> Iterator[Candidate]:
    """The same shapes with fewer and with more trainer devices."""
    here = best.layout
    if here.colocated:
        return
    same = [
        layout
        for layout in layouts
        if layout.generation == here.generation
        and layout.training.device == here.training.device
        and layout.slots == here.slots
        and (layout.other is None) == (here.other is None)
    ]
    by_size = sorted({layout.training.devices: layout for layout in same}.items())
    index = [size for size, _ in by_size].index(here.training.devices)
    for step in (-2, 2, -1, 1):
        if 0 <= index + step < len(by_size):
            yield replace(best, layout=by_size[index + step][1])


def _slots(
    config: PlanConfig, demand: Demand, best: Candidate, layouts: Sequence[PlanLayout]
) -> Iterator[Candidate]:
    here = best.layout
    most = min(max(slots_that_fit(one, demand)) for one in (here.generation, here.other) if one is not None)
    for slots in slots_that_fit(here.generation, demand):
        if slots in (here.slots // 2, here.slots * 2) and slots <= most:
            layout = replace(here, slots=slots)
            seconds = layout_generate_s(layout, demand)
            yield replace(best, layout=replace(layout, generate_s=seconds))


def _batches(
    config: PlanConfig, demand: Demand, best: Candidate, layouts: Sequence[PlanLayout]
) -> Iterator[Candidate]:
    for prompts in config.batch.prompts:
        if prompts != best.prompts:
            yield replace(best, prompts=prompts, layout=for_batch(best.layout, prompts, config, demand))


def demand_of_batch(prompts: int, config: PlanConfig, demand: Demand) -> Demand:
    return replace(demand, samples=prompts * config.batch.group_size)


def for_batch(layout: PlanLayout, prompts: int, config: PlanConfig, demand: Demand) -> PlanLayout:
    """The layout with the predictions of another batch."""
    other = demand_of_batch(prompts, config, demand)
    return replace(
        layout,
        train_s=train_s(layout.training, other),
        generate_s=layout_generate_s(layout, other),
    )


def _schedules(
    config: PlanConfig, demand: Demand, best: Candidate, layouts: Sequence[PlanLayout]
) -> Iterator[Candidate]:
    """Laminar's rounds and repack: as derived, packed less densely, with rounds of twice the size, without
    repack; and trajectories of several versions."""
    if config.staleness_max == 0:
        return
    if best.layout.colocated:
        yield replace(best, schedule=schedules.Synchronous())
        return
    share, half = -(-best.prompts // best.layout.all_replicas), max(1, best.layout.slots // 2)
    bound = config.staleness_max
    for schedule in (
        schedules.Laminar(staleness_max=bound),
        schedules.AReaL(eta=bound),
        schedules.Laminar(staleness_max=bound, batch_max=half),
        schedules.Laminar(staleness_max=bound, batch_max=half, round_groups=2 * share),
        schedules.Laminar(staleness_max=bound, repack=False),
    ):
        yield replace(best, schedule=schedule)


def _transports(
    config: PlanConfig, demand: Demand, best: Candidate, layouts: Sequence[PlanLayout]
) -> Iterator[Candidate]:
    for transport in config.search.transports:
        if transport != best.transport:
            yield replace(best, transport=transport)


def _faster(best: Simulated | None, other: Simulated | None) -> Simulated | None:
    if best is None or other is None:
        return best or other
    return other if other.tokens_per_s > FASTER * best.tokens_per_s else best
