"""RLAX's two claims about a fleet of TPUs (arXiv:2512.06392), as scenarios of the simulator.

Scaling: with a trainer on v5p-512, 8 times the rollout cores (v5p-128 to v5p-1024) gave 8.0 times the
rollout throughput, and steps 3.6 times as fast (a summary of its Figure 3: the paper's second version is
withdrawn, and no code is public). Preemption: QwQ-32B was trained on 1024 v5p for 12 h 48 min "while
remaining robust to preemptions" (abstract). No source tells the batch, the lengths, the time of a step,
how many preemptions, or what they cost. So these are chosen here, and what is simulated is ours, beside
those ratios.

Chosen: 512 prompts x 16, lengths with a median of 4000 and a 99th percentile of 32 000 tokens, replicas of
one host (4 chips) with 64 slots, the model of Qwen2.5-32B. Reload staleness 1, acceptance staleness 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from millrace.config.tables.operation import Checkpoints
from millrace.config.tables.schedules import RLAX
from millrace.config.tables.training import BatchShape
from millrace_sim.config import ClusterSection, LogNormalLengths, SimulatedConfig, WorkloadSection
from millrace_sim.measure import Result, measure
from millrace_sim.setup import scenario
from millrace_sim.simulation import Outcome, Scenario, simulate
from millrace_sim.virtual.faults import Failures, Faults
from millrace_sim.virtual.seeded import stream

ROLLOUT_SCALING, STEP_SCALING = 8.0, 3.6
"""Published, for 8 times the rollout cores: rollout throughput, and how many times as fast steps became."""
CHIPS_PER_REPLICA, CORES_PER_CHIP = 4, 2
ABSENT_S = (120.0, 300.0)
"""From a preemption until another slice has started the process. Assumed."""
BOUND = 0.9
"""The trainer binds where it computes this fraction of the time."""
CRASHES_MAX = 1000
NEVER_S = 1e12
KINDS = ("replica", "trainer", "run")


@dataclass(frozen=True, slots=True)
class Size:
    """A fleet, its batch, and how many steps are simulated."""

    trainer_chips: int = 256
    prompts: int = 512
    group_size: int = 16
    slots: int = 64
    steps: int = 8
    median: float = 4000.0
    max_tokens: int = 32_000

    def shrunk(self, times: int) -> Size:
        """The load of every device stays what it is."""
        return replace(self, trainer_chips=self.trainer_chips // times, prompts=self.prompts // times)


def cores(replicas: int) -> int:
    """The number in the name of a slice: v5p-128 has 128 cores, two a chip."""
    return replicas * CHIPS_PER_REPLICA * CORES_PER_CHIP


def fleet(size: Size, replicas: int) -> Scenario:
    cluster = ClusterSection(
        model="Qwen2.5-32B",
        device="TPU v5p",
        trainer_devices=size.trainer_chips,
        replicas=replicas,
        tensor_parallel=CHIPS_PER_REPLICA,
        slots=size.slots,
    )
    return scenario(
        SimulatedConfig(
            steps=size.steps,
            batch=BatchShape(prompts=size.prompts, group_size=size.group_size),
            schedule=RLAX(reload_staleness=1, acceptance_staleness=2),
            cluster=cluster,
            lengths=LogNormalLengths(median=size.median, p99=8 * size.median),
            workload=WorkloadSection(prompt_tokens=(256, 1024), max_tokens=size.max_tokens),
        )
    )


def scaled(size: Size, replicas: int) -> Result:
    """What a trainer and a batch of this size do with so many replicas."""
    return measure(fleet(size, replicas))[0]


# ---------------------------------------------------------------- preemptions


@dataclass(frozen=True, slots=True)
class Disturbed:
    """A run under preemptions beside the same run without. `goodput` is a fraction of its trained tokens per
    second. `replayed` steps were done before, and lost."""

    goodput: float
    preemptions: int
    replayed: int
    wall_s: float


def disturbed(
    size: Size, replicas: int, kind: str, interval_s: float, *, every: int = 5, seed: int = 0
) -> Disturbed:
    """One preemption of `kind` each `interval_s` on average: of the trainer, of one replica of the fleet, or
    of the whole run. Checkpoints every `every` versions."""
    calm = _played(size, replicas, kind, NEVER_S, every=every, seed=seed)
    after = _played(size, replicas, kind, interval_s, every=every, seed=seed)
    return Disturbed(
        goodput=_tokens_per_s(after) / _tokens_per_s(calm),
        preemptions=after.resumes if kind == "run" else after.restarts,
        replayed=sum(step["replayed"] for step in after.of("step")),
        wall_s=after.wall_s,
    )


@cache
def _played(size: Size, replicas: int, kind: str, interval_s: float, *, every: int, seed: int) -> Outcome:
    """Up to its first preemption a run is that of any other interval: both draw the same numbers."""
    calm = fleet(size, replicas)
    return simulate(
        replace(
            calm,
            seed=seed,
            config=calm.config.model_copy(update={"checkpoints": Checkpoints(every=every)}),
            faults=preemptions(kind, interval_s, replicas=replicas, seed=seed),
            scale=replace(calm.scale, keep_events=frozenset({"step"})),
        )
    )


def preemptions(kind: str, interval_s: float, *, replicas: int, seed: int) -> Faults:
    """Every worker that is preempted is absent for `ABSENT_S`, drawn anew each time."""
    match kind:
        case "trainer":
            return Faults(failures=(Failures("trainer", interval_s),), spawn_s=ABSENT_S)
        case "replica":
            return Faults(failures=(Failures("replica-*", interval_s * replicas),), spawn_s=ABSENT_S)
        case "run":
            rng, at_s, crashes = stream(seed, "preemptions"), 0.0, []
            for _ in range(CRASHES_MAX):
                at_s += rng.expovariate(1.0 / interval_s)
                crashes.append(at_s)
            return Faults(controller_crashes=tuple(crashes), spawn_s=ABSENT_S)
    raise ValueError(f"no preemption is called {kind!r}; known: {', '.join(KINDS)}")


def _tokens_per_s(outcome: Outcome) -> float:
    """Of trained tokens, each counted once, over the whole run with its start."""
    steps = [step for step in outcome.of("step") if not step["replayed"]]
    return sum(step["trained_tokens"] for step in steps) / outcome.wall_s
