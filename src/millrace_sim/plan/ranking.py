"""`millrace plan`: from a model, devices, lengths and a staleness budget to a ranking and a configuration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from millrace.core.errors import ConfigError
from millrace.placement.memory.engine_memory import usable_bytes
from millrace_sim.config import PlanConfig
from millrace_sim.costs import hardware, models
from millrace_sim.costs.cluster import Cluster
from millrace_sim.costs.generation import Generation
from millrace_sim.costs.hardware import Device
from millrace_sim.costs.models import ModelSizes
from millrace_sim.costs.training import Training
from millrace_sim.measure import Result
from millrace_sim.plan.layouts import Demand, PlanLayout, generate_s, layouts, layouts_in_turns
from millrace_sim.plan.search import (
    Candidate,
    Simulated,
    demand_of_batch,
    for_batch,
    search,
    simulate_candidate,
)
from millrace_sim.plan.theory import (
    BestAsynchronous,
    BestSynchronous,
    Problem,
    solve_asynchronous,
    solve_synchronous,
)
from millrace_sim.setup import lengths_of

LENGTH_DRAWS = 4096
BUSY = 0.9
"""A side that works for this share of the time is a bottleneck."""


@dataclass(frozen=True)
class Theory:
    """LlamaRL's optima on one kind of device."""

    device: str
    synchronous: BestSynchronous | None  # None: it does not fit
    asynchronous: BestAsynchronous | None


@dataclass(frozen=True)
class Gain:
    """The gain from one more device of a kind: relative throughput, and the role of the device."""

    device: str
    throughput: float
    role: str


@dataclass(frozen=True)
class Plan:
    """`ranking` is of simulated candidates, the fastest first; `num_layouts` fitted in memory."""

    config: PlanConfig
    demand: Demand
    theory: list[Theory]
    num_layouts: int
    ranking: list[Simulated]
    bottleneck: str
    gains: list[Gain]
    checkpoints: CheckpointPlan

    @property
    def best(self) -> Simulated:
        return self.ranking[0]


def plan(config: PlanConfig, on_simulated: Callable[[Simulated], None] = lambda one: None) -> Plan:
    """Make a plan. `on_simulated` gets each simulated candidate.

    Raises: ConfigError: an unknown model or device, or nothing fits.
    """
    model, devices, demand = models.model(config.model), devices_of(config), demand_of(config)
    fitting = layouts(model, devices, demand, config.search.dtypes)

    def run(candidate: Candidate) -> Simulated:
        one = simulate_candidate(config, candidate)
        on_simulated(one)
        return one

    in_turns = layouts_in_turns(model, devices, demand, config.search.dtypes)
    ranking = search(config, demand, fitting, run, in_turns)
    best = ranking[0]
    return Plan(
        config=config,
        demand=demand,
        theory=[_theory(model, device, count, demand) for device, count in devices.items()],
        num_layouts=len(fitting) + len(in_turns),
        ranking=ranking,
        bottleneck=bottleneck(best.result),
        gains=gains(devices, demand, config, best),
        checkpoints=planned_interval(best.candidate.layout, best.result, config.device_mtbf_h),
    )


def bottleneck(result: Result) -> str:
    """Names the slower side, and a remedy."""
    times = (
        f"the trainer waits {result.trainer_waits:.0%} of the time, replicas work {result.replica_busy:.0%}"
    )
    if result.trainer_waits < 1 - BUSY:
        return f"the trainer ({times})"
    if result.replica_busy >= BUSY:
        return f"generation ({times})"
    return (
        f"the long tail under the staleness bound ({times}): a looser bound, shorter completions or fewer "
        "trajectories at a time on a replica help more than devices"
    )


def gains(devices: dict[Device, int], demand: Demand, config: PlanConfig, best: Simulated) -> list[Gain]:
    """Predicted gains. With one more device the shapes stay, and the split changes.

    The prediction is continuous: a tenth of a replica counts. If both sides use one kind of device, the step
    takes (train + generate device-seconds) / devices. If each side has its own kind, only the slower side
    gains.
    """
    layout = for_batch(best.candidate.layout, best.candidate.prompts, config, demand)
    trainer, generator = layout.training.device, layout.generation.device
    results = []
    for device, count in devices.items():
        if device not in (trainer, generator):
            results.append(Gain(device.name, 0.0, "idle in this plan"))
        elif layout.colocated:
            results.append(Gain(device.name, 1 / count, "both, in turns"))
        elif trainer == generator:
            results.append(Gain(device.name, 1 / count, "both, at the best split"))
        else:
            after_s, role = _one_more(layout, device, demand_of_batch(best.candidate.prompts, config, demand))
            results.append(Gain(device.name, layout.step_s / after_s - 1, role))
    return results


def _one_more(layout: PlanLayout, device: Device, demand: Demand) -> tuple[float, str]:
    """Seconds of a step with one more `device`, and its role. Other replicas are of the trainer's kind. So a
    device of this kind generates if generation is the slower side."""
    kind, num = layout.generation, layout.replicas
    if device != kind.device:
        if layout.other is None or layout.generate_s <= layout.train_s:
            devices = layout.training.devices
            return max(layout.train_s * devices / (devices + 1), layout.generate_s), "training"
        kind, num = layout.other, layout.other_replicas
    speed = 1 / (generate_s(kind, num, layout.slots, demand) * num * kind.tensor_parallel)
    return max(layout.train_s, 1 / (1 / layout.generate_s + speed)), "generation"


# ---------------------------------------------------------------- the question


def devices_of(config: PlanConfig) -> dict[Device, int]:
    """Raises: ConfigError: none, or an unknown kind."""
    counts = {hardware.device(name): count for name, count in config.devices.items() if count > 0}
    if not counts:
        raise ConfigError("`devices` is empty: say how many of which kind there are, as in `H800 = 64`")
    return counts


def demand_of(config: PlanConfig) -> Demand:
    """Means over `LENGTH_DRAWS` completions, cut at `max_tokens`, with what an environment answers."""
    lengths, most = lengths_of(config.lengths, config.batch.group_size), config.workload.max_tokens
    completion = fmean(min(most, max(1.0, lengths.draw(config.seed, i))) for i in range(LENGTH_DRAWS))
    (shortest, longest), turns = config.workload.prompt_tokens, fmean(config.workload.turns)
    completion = turns * completion + (turns - 1) * config.workload.observation_tokens
    samples = config.batch.prompts[0] * config.batch.group_size
    return Demand(samples, (shortest + longest) / 2, completion, longest + config.workload.longest)


# ---------------------------------------------------------------- theory


def _theory(model: ModelSizes, device: Device, count: int, demand: Demand) -> Theory:
    problem = problem_of(model, device, count, demand)

    def solved(solve: Callable[[Problem], Any]) -> Any:
        try:
            return solve(problem)
        except ConfigError:
            return None

    return Theory(device.name, solved(solve_synchronous), solved(solve_asynchronous))


def problem_of(model: ModelSizes, device: Device, count: int, demand: Demand) -> Problem:
    """Problems (6) and (7) with this cost model: W0 in bf16, K_g of a sample at its mean length, activations
    of a whole sample with recomputation."""
    length = round(demand.prompt_tokens + demand.completion_tokens)
    training = Training(model, device, 1)

    def train(batch: int, size: int) -> float:
        return replace(training, devices=size, model_parallel=size).sample_s(batch, length)

    def generate(batch: int, size: int) -> float:
        return Generation(model, device, size).sample_s(batch, demand.prompt_tokens, demand.completion_tokens)

    return Problem(
        samples=demand.samples,
        devices=count,
        memory=usable_bytes(device.memory_bytes),
        weights=float(model.weights_bytes()),
        activations=training.activation_bytes(length),
        kv=float(length * model.kv_token_bytes()),
        train_s=train,
        generate_s=generate,
    )


def training_config(plan: Plan, base: dict[str, Any]) -> dict[str, Any]:
    """The best candidate as keys of a training configuration, merged into `base`.

    The assignment of devices and the transport are in the plan's table only.
    """
    best = plan.best.candidate
    training, generation = best.layout.training, best.layout.generation
    several = {"tensor": generation.tensor_parallel, "engine": "vllm"}
    workload = plan.config.workload
    chosen: dict[str, dict[str, Any]] = {
        "model": {"dtype": "bfloat16"},
        "batch": {"prompts": best.prompts, "group_size": plan.config.batch.group_size},
        "sampling": {"max_tokens": workload.max_tokens},
        "trainer": {"shard": training.ranks, "tensor": training.model_parallel},
        "rollout": {
            "replicas": best.layout.all_replicas,
            "slots": best.layout.slots,
            "max_sequence_tokens": plan.demand.longest,
            **(several if generation.tensor_parallel > 1 else {}),
            **({"colocated": True} if best.layout.colocated else {}),
        },
        "checkpoints": {"every": plan.checkpoints.every},
    }
    tree = dict(base)
    for section, keys in chosen.items():
        tree[section] = {**tree.get(section, {}), **keys}
    tree["schedule"] = best.schedule.model_dump(mode="json")
    return tree


# ---------------------------------------------------------------- checkpoints

INTERVAL_S_MAX = 1800.0
"""A stall of seconds in half an hour costs next to nothing, and people and software end runs too."""


@dataclass(frozen=True, slots=True)
class CheckpointCosts:
    """Seconds. `replay_s`: a repeated step. `save_s`: until a checkpoint is complete."""

    step_s: float
    replay_s: float
    stall_s: float
    save_s: float = 0.0

    def loss(self, every: int, mtbf_s: float) -> float:
        """Share of the time that saving every `every` steps loses."""
        return self.stall_s / (every * self.step_s) + (every - 1) / 2 * self.replay_s / mtbf_s


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """Save every `every` steps, which are `interval_s` seconds. `loss` is a share of the time."""

    every: int
    interval_s: float
    loss: float
    mtbf_s: float


def best_interval(costs: CheckpointCosts, mtbf_s: float) -> CheckpointPlan:
    """How often to save: the stall of a checkpoint, against the steps that a death of the trainer repeats.

    Every `n` steps of `s` seconds, with a stall of `C` and a mean time between failures of `M`, the loss is

        C / (n s)  +  (n - 1) / 2 * r / M,        n* = sqrt(2 C M / (s r))

    `r` is what one repeated step costs. Where a repeated step costs what a step costs (r = s), n* s is the
    optimum of Young (1974) and Daly (2006), sqrt(2 C M). Here r is less: the batches are in the ledger, so
    that nothing is generated again. What a failure costs at any interval is left out: a restart, the step
    under way. An interval is at most `INTERVAL_S_MAX` long. A checkpoint is complete before the next begins.
    """
    best = math.sqrt(2 * costs.stall_s * mtbf_s / (costs.step_s * max(costs.replay_s, 1e-9)))
    least = max(1, math.ceil(costs.save_s / costs.step_s))
    most = max(least, math.floor(INTERVAL_S_MAX / costs.step_s))
    near = {min(max(least, whole), most) for whole in (math.floor(best), math.ceil(best))}
    every = min(near, key=lambda one: (costs.loss(one, mtbf_s), one))
    return CheckpointPlan(every, every * costs.step_s, costs.loss(every, mtbf_s), mtbf_s)


def planned_interval(layout: PlanLayout, result: Result, device_mtbf_h: float) -> CheckpointPlan:
    """For a simulated layout: its time of a step, the trainer's part of that, and its devices."""
    costs = Cluster(layout.generation, layout.training, layout.replicas).costs(1)
    seconds = CheckpointCosts(
        result.step_s, result.trainer_busy * result.step_s, costs.snapshot_s, costs.save_s
    )
    return best_interval(seconds, device_mtbf_h * 3600 / layout.training.devices)
