"""RobustRL's experiment (OSDI '26; arXiv:2512.22492) as scenarios of the simulator, and its measure, ETTR.

Published (sections 5 and 7): 32 machines of 8 H20; as many devices train as generate; a replica is one
machine; Qwen3-8B on DAPO-Math, 64 prompts x 8, at most 65,536 tokens, 100 steps; "10 %": one fault of the
trainer at a random time within every 10 steps. A trainer alone is back after 173.0 s, a whole job after
277.8 s (figure 15). A replica is back after 119 s: scheduling 30, container 30, engine 49, weights 10. A
checkpoint stalls the trainer for 3 s, and is on disk 10 s later. RobustRL saves every step, and ByteRobust
every 5 (figure 14).

ETTR (section 7.2) counts training and generation as effective. While only the trainer is absent, it counts
the share of the devices that generate. So here it is the share of device seconds in which a device's role is
up and not stalled. Waiting for the other side counts as effective, and so does work that is done again: see
`Lost`, and goodput.

Not published, and chosen here: the lengths of completions (`MEDIAN`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from millrace.config.tables.operation import Checkpoints
from millrace.config.tables.schedules import Millrace
from millrace.config.tables.training import BatchShape
from millrace.core.events import Event
from millrace_sim.config import ClusterSection, LogNormalLengths, SimulatedConfig, WorkloadSection
from millrace_sim.costs.cluster import ClusterCosts
from millrace_sim.setup import PATIENCE_S, scenario
from millrace_sim.simulation import Observer, Scenario, simulate
from millrace_sim.virtual.faults import Faults, Starts, Strike
from millrace_sim.virtual.seeded import stream

ETTR, BYTEROBUST_ETTR = 0.80, 0.60
"""Published with 10 % (abstract): over 0.80, and ByteRobust 0.60."""
TRAINER_S, JOB_S, REPLICA_S = 173.0, 277.8, 119.0
"""Published: from a death until the role is of use again."""
STALL_S, SAVE_S = 3.0, 10.0
"""Published: what a checkpoint costs the trainer, and until it is on disk."""
BYTEROBUST_EVERY = 5
MEDIAN = 2500.0
"""Tokens of a completion, chosen so that this controller with RobustRL's times has about its ETTR, 0.80. The
99th percentile is 8 times as long: assumed."""
LONG_MEDIAN = 9000.0
"""Chosen for long steps. A step takes 207 s here on 128 devices. Published are about 300 s, of which a
checkpoint of 3 s is 1 % (section 7.4)."""
RELAY_S, REWARD_S = 10.0, 10.0
"""A process that holds no device: container and imports. Assumed."""
APART = 10
"""Steps for each fault: "10 %"."""


@dataclass(frozen=True, slots=True)
class Size:
    """The cluster, the batch, and how many steps are simulated."""

    machines: int = 32
    prompts: int = 64
    group_size: int = 8
    steps: int = 100
    median: float = MEDIAN
    p99: float = 8 * MEDIAN
    max_tokens: int = 65_536

    @property
    def devices(self) -> int:
        return 8 * self.machines

    def shrunk(self, times: int) -> Size:
        """The load of every device stays what it is."""
        return replace(self, machines=self.machines // times, prompts=self.prompts // times)


@dataclass(frozen=True, slots=True)
class System:
    """How a system recovers. `trainer_s`: from the death of a trainer until it has loaded its checkpoint.

    `whole_job`: any death ends the whole job, which comes back after `job_s` and knows what its last
    checkpoint knew. Its trajectories under way begin again.
    """

    every: int = 1
    trainer_s: float = TRAINER_S
    job_s: float = JOB_S
    stall_s: float = STALL_S
    save_s: float = SAVE_S
    whole_job: bool = False


@dataclass(frozen=True, slots=True)
class StandbySystem(System):
    """A standby of the trainer waits. Of `trainer_s` it has spent all but `remains_s`."""

    remains_s: float = 0.0


BYTEROBUST = System(every=BYTEROBUST_EVERY, whole_job=True)


@dataclass(frozen=True, slots=True)
class StoredCosts(ClusterCosts):
    """Costs with a published checkpoint. A start's time holds the load of its checkpoint."""

    stall_s: float = STALL_S
    stored_s: float = SAVE_S
    load_s: float = 0.0  # type: ignore[misc]  # what a start does not hold, where a standby has started

    @property
    def snapshot_s(self) -> float:
        return self.stall_s

    @property
    def save_s(self) -> float:
        return self.stored_s


def world(size: Size, system: System, faults: Faults = Faults(), *, seed: int = 0) -> Scenario:
    """The published experiment under `system`. `faults` says who dies; `system` how long starts take."""
    half = size.machines // 2
    section = ClusterSection(
        model="Qwen3-8B",
        device="H20",
        trainer_devices=8 * half,
        model_parallel=8,
        replicas=half,
        tensor_parallel=8,
        slots=64,
        log_prob_pass=True,
    )
    calm = scenario(
        SimulatedConfig(
            steps=size.steps,
            batch=BatchShape(prompts=size.prompts, group_size=size.group_size),
            schedule=Millrace(),
            cluster=section,
            lengths=LogNormalLengths(median=size.median, p99=size.p99),
            workload=WorkloadSection(prompt_tokens=(64, 512), max_tokens=size.max_tokens),
        ),
        seed=seed,
    )
    costs = calm.costs
    assert isinstance(costs, ClusterCosts)
    standby, remains_s = isinstance(system, StandbySystem), getattr(system, "remains_s", 0.0)
    stored = StoredCosts(
        costs.cluster, costs.quantum, stall_s=system.stall_s, stored_s=system.save_s, load_s=remains_s
    )
    scale = calm.scale
    progress_s = PATIENCE_S if system.whole_job else 8 * (scale.report_interval_s or 1.0)
    return replace(
        calm,
        config=calm.config.model_copy(
            update={
                "checkpoints": Checkpoints(every=system.every),
                "trainer": calm.config.trainer.model_copy(update={"standby": standby}),
            }
        ),
        costs=stored,
        faults=replace(faults, starts=_starts(system), forgets=system.whole_job),
        scale=replace(scale, progress_interval_s=progress_s),
    )


def _starts(system: System) -> tuple[Starts, ...]:
    if system.whole_job:
        return (Starts("*", (system.job_s, system.job_s)),)
    start_s = system.trainer_s - getattr(system, "remains_s", 0.0)
    seconds = {"trainer*": start_s, "replica-*": REPLICA_S, "relay*": RELAY_S, "reward*": REWARD_S}
    return tuple(Starts(names, (one_s, one_s)) for names, one_s in seconds.items())


# ---------------------------------------------------------------- faults


def injected(size: Size, role: str, step_s: float, *, whole_job: bool, seed: int) -> Faults:
    """A fault of `role` at a random time within every `APART` steps, the same for every system."""
    rng, strikes = stream(seed, "goodput", role), []
    for begin in range(0, size.steps - APART + 1, APART):
        version = max(1, begin + rng.randrange(APART))
        name, after_s = victim(role, size, rng), rng.uniform(0.0, step_s)
        strikes.append(Strike("controller" if whole_job else name, version, after_s))
    return Faults(strikes=tuple(strikes))


def exponential(size: Size, mtbf_steps: float, step_s: float, seed: int) -> Faults:
    """Faults of the trainer, exponentially distributed in steps, the same for every interval."""
    rng, at, strikes = stream(seed, "goodput", "exponential"), 1.0, []
    while (at := at + rng.expovariate(1 / mtbf_steps)) < size.steps - 1:
        strikes.append(Strike("trainer", int(at), at % 1 * step_s))
    return Faults(strikes=tuple(strikes))


def victim(role: str, size: Size, rng: random.Random) -> str:
    """One worker of the role, drawn."""
    match role:
        case "replica":
            return f"replica-{rng.randrange(size.machines // 2)}"
        case "reward worker":
            return "reward-worker-0"
        case _:
            return role


def storm(size: Size, share: float, version: int, after_s: float) -> Faults:
    """A share of the replicas goes at one moment. Each comes back after `REPLICA_S`."""
    count = round(share * (size.machines // 2))
    return Faults(strikes=tuple(Strike(f"replica-{i}", version, after_s) for i in range(count)))


# ---------------------------------------------------------------- measure


@dataclass(slots=True)
class Measured:
    """Of one run, from its first commit to its last. `recovery_s`: by role, from a death until the role is of
    use again. `again`: steps that were done before. `generated` and `trained` are tokens."""

    wall_s: float = 0.0
    ettr: float = 0.0
    step_s: float = 0.0
    deaths: int = 0
    again: int = 0
    generated: float = 0.0
    trained: float = 0.0
    stalled_s: float = 0.0
    waited_s: float = 0.0
    recovery_s: dict[str, list[float]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Watch(Observer):
    """Adds up device seconds in which a role is absent or stalled."""

    def __init__(self, size: Size, quantum: int) -> None:
        self._size, self._quantum = size, quantum
        self._absent: dict[str, float] = {}  # name -> since when
        self._seen: dict[str, float] = {}  # generated tokens of each replica's incarnation
        self._first_s: float | None = None
        self._lost_device_s = 0.0
        self._newest = 0
        self._steps: Counter[int] = Counter()
        self._now_s = 0.0
        self._trains = "trainer"  # the name of the one that trains
        self.measured = Measured()

    def on_event(self, event: Event) -> None:
        fields, self._now_s = event.fields, event.time_s
        match event.kind:
            case "step":
                self._step(event.time_s, fields)
            case "checkpoint" | "published" if self._first_s is not None:
                self.measured.stalled_s += fields["stall_s"]
                self._lose("trainer", fields["stall_s"])
            case "took_over":
                self._trains = fields["name"]
            case "worker_died" if fields["name"] == self._trains:
                self._die(("trainer",), event.time_s)
            case "worker_died" if role_of(fields["name"]) != "trainer":
                self._die((fields["name"],), event.time_s)
            case "pulled":
                self._returns(fields["replica"], event.time_s)
            case "staged":
                self._returns("relay", event.time_s)
            case "worker_started" if fields["role"] == "reward worker":
                self._returns(fields["name"], event.time_s)
            case "report":
                self._report(fields)

    def on_crash(self) -> None:
        self._trains = "trainer"
        self._die(("trainer", *(f"replica-{i}" for i in range(self._size.machines // 2))), self._now_s)

    def _die(self, names: tuple[str, ...], now_s: float) -> None:
        self.measured.deaths += self._first_s is not None
        for name in names:
            self._absent.setdefault(name, now_s)

    def _returns(self, name: str, now_s: float) -> None:
        since_s = self._absent.pop(name, None)
        if since_s is None or self._first_s is None:
            return
        self.measured.recovery_s.setdefault(role_of(name), []).append(now_s - since_s)
        self._lose(name, now_s - since_s)

    def _lose(self, name: str, seconds: float) -> None:
        role = role_of(name)
        devices = {"trainer": self._size.devices / 2, "replica": 8.0}.get(role, 0.0)
        self._lost_device_s += devices * seconds

    def _step(self, now_s: float, fields: Mapping[str, Any]) -> None:
        version = fields["version"]
        first_time = version > self._newest
        self._newest = max(version, self._newest)
        if self._first_s is None:
            self._first_s = now_s
        elif not fields["replayed"]:
            self._returns("trainer", now_s - fields["step_s"] - fields["wait_s"])
        self.measured.again += not first_time
        self.measured.waited_s += fields["wait_s"]
        if first_time:
            self.measured.trained += fields["trained_tokens"] * self._quantum
            self.measured.wall_s = now_s - self._first_s

    def _report(self, load: Mapping[str, Any]) -> None:
        name, tokens = load["replica"], load["generated_tokens"]
        before = self._seen.get(name, 0.0)
        self.measured.generated += (tokens - before if tokens >= before else tokens) * self._quantum
        self._seen[name] = tokens

    def on_end(self, ledger: object, world: object) -> None:
        measured = self.measured
        measured.ettr = 1.0 - self._lost_device_s / (self._size.devices * measured.wall_s)
        measured.step_s = measured.wall_s / max(1, self._newest - 1)


def role_of(name: str) -> str:
    return name.rstrip("0123456789").rstrip("-").replace("-", " ")


def run(size: Size, system: System, faults: Faults = Faults(), *, seed: int = 0) -> Measured:
    one = world(size, system, faults, seed=seed)
    watch = Watch(size, one.workload.quantum)
    simulate(replace(one, scale=replace(one.scale, keep_events=frozenset())), watch)
    return watch.measured


def recovery(measured: list[Measured], role: str) -> tuple[float, float] | None:
    """Median and worst of several runs."""
    times = [one_s for one in measured for one_s in one.recovery_s.get(role, ())]
    return (median(times), max(times)) if times else None
