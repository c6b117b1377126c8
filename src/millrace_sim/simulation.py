"""A whole run in virtual time: the real controller, schedule and ledger over simulated roles."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash

from millrace.config.schema import Config
from millrace.controller.controller import Controller
from millrace.controller.fleet.fleet import Fleet, standby_of
from millrace.controller.pace import PACE, Pace
from millrace.controller.state.run_state import RunState
from millrace.controller.supervisor import WorkerSpec
from millrace.core import clock
from millrace.core.errors import ConfigError
from millrace.core.events import Event, Events
from millrace.core.placement import THIS_HOST, Place
from millrace.core.types import Accounting
from millrace.ledger.accounts import Accounts
from millrace.ledger.buffer import Buffer
from millrace.ledger.records import read_counts
from millrace.ledger.recovery import last_version
from millrace.ledger.sqlite import SqliteLedger
from millrace.schedule.presets import build
from millrace_sim.costs.interface import CostModel, Costs
from millrace_sim.costs.workload import Workload
from millrace_sim.roles.world import World
from millrace_sim.virtual import loop
from millrace_sim.virtual.faults import Faults, Latency
from millrace_sim.virtual.seeded import stream
from millrace_sim.virtual.sim_runtime import SimRuntime


@dataclass(frozen=True, slots=True)
class Scale:
    """How finely a run is simulated. The defaults are faithful to a run of real processes. A plan for a large
    cluster does not need every message.

    Args:
        isolate              copy every message, as between processes pace                 of the controller's
        loops; a step is committed at once whatever it is report_interval_s    of replicas, in place of the
        configuration's: a cluster's run may take days progress_interval_s  replicas report unfinished
        trajectories this often; None: with every report slice_s              replicas decode in slices of
        this length; commands take effect between them; 0: none kv_capacity_tokens   of a replica; None:
        `slots x max_sequence_tokens` paged                KV is taken as it is used, and sequences are
        preempted when it runs out parallel_rewards     a reward worker stands for a pool that begins all
        requests of a call at once keep_events          kinds of events to keep in the outcome; None: all
    """

    isolate: bool = True
    pace: Pace = PACE
    report_interval_s: float | None = None
    progress_interval_s: float | None = None
    slice_s: float = 0.0
    kv_capacity_tokens: int | None = None
    paged: bool = False
    parallel_rewards: bool = False
    keep_events: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Scaling:
    """At `at_s` a user asks for `replicas` replicas."""

    at_s: float
    replicas: int


@dataclass(frozen=True, slots=True)
class OtherReplicas:
    """`num` replicas with costs and a KV memory of their own."""

    num: int
    costs: CostModel
    kv_capacity_tokens: int


@dataclass(frozen=True, slots=True)
class Scenario:
    """A configuration, and its world. Its last replicas are the `others`, in their order. Of several `hosts`
    the first has the trainer. Replicas go round all hosts. Replicas that join go round `later_hosts` further
    hosts too."""

    config: Config
    seed: int = 0
    costs: CostModel = Costs()
    others: tuple[OtherReplicas, ...] = ()
    workload: Workload = Workload()
    faults: Faults = Faults()
    latency: Latency = Latency()
    time_max_s: float = 86_400.0
    hosts: int = 1
    later_hosts: int = 0
    scale: Scale = Scale()
    scalings: tuple[Scaling, ...] = ()


@dataclass(slots=True)
class Outcome:
    """The result of a simulated run. `digest` is of the event trace."""

    digest: str = ""
    wall_s: float = 0.0
    restarts: int = 0
    resumes: int = 0
    accounting: Accounting = Accounting()
    events: list[Event] = field(default_factory=list)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Fields of all events of a kind, in order."""
        return [event.fields for event in self.events if event.kind == kind]


class Observer:
    """Observes a run from inside. Every method may raise, which ends the run with that error."""

    def on_start(self, world: World) -> None:
        """Before anything happens."""

    def on_event(self, event: Event) -> None:
        """Something happened."""

    def on_crash(self) -> None:
        """The controller died, and every worker with it."""

    def on_decision(self, state: RunState) -> None:
        """The controller's state after a round of decisions."""

    def on_end(self, ledger: SqliteLedger, world: World) -> None:
        """The run is over, as it should be."""


def simulate(scenario: Scenario, observer: Observer | None = None) -> Outcome:
    """Run the scenario to its end.

    Raises: errors of the run or the observer; DeadlockError; DeadlineExceeded past `time_max_s`.
    """
    return loop.run(
        _Simulation(scenario, observer or Observer()).run(),
        seed=scenario.seed,
        time_max_s=scenario.time_max_s,
    )


class _Ledger(SqliteLedger):
    """A ledger in memory. `image` has what an earlier ledger had flushed when its controller died."""

    def __init__(self, world: World, image: bytes | None = None) -> None:
        super().__init__(":memory:", run={}, checkpoint_ok=lambda info: info.path in world.checkpoints)
        if image is not None:
            self._db.deserialize(image)
            self._accounts = Accounts(read_counts(self._db))
            self._version = last_version(self._db)
            self._buffer = Buffer(self._accounts)

    def image(self) -> bytes:
        return self._db.serialize()


class _Simulation:
    """One run on one ledger, with one controller after the other. Each ends by a crash, or with the run."""

    def __init__(self, scenario: Scenario, observer: Observer) -> None:
        self._scenario, self._observer = scenario, observer
        faults = scenario.faults
        self._world = World(seed=scenario.seed, corruption=faults.corruption, poisonous=faults.poisonous)
        self._outcome, self._trace = Outcome(), TraceDigest()
        self._crashed = False
        self._replicas = scenario.config.rollout.replicas  # as last asked for
        self._strikes = list(faults.strikes)  # those to come
        self._trains = "trainer"  # the name of the one that trains
        self._ledger = _Ledger(self._world)
        self._remembered: bytes | None = None  # the ledger's image at the last checkpoint
        self._runtime: SimRuntime | None = None
        self._life: asyncio.Timeout | None = None

    async def run(self) -> Outcome:
        outcome, scenario = self._outcome, self._scenario
        self._observer.on_start(self._world)
        running = asyncio.get_running_loop()
        for jump in self._scenario.faults.clock_jumps:
            assert isinstance(running, loop.VirtualLoop), running
            running.call_at(jump.at_s, running.jump, jump.by_s)
        crashes = deque(sorted(scenario.faults.controller_crashes))
        while not await self._live(crashes[0] if crashes else None):
            while crashes and crashes[0] <= clock.now():
                crashes.popleft()
            image = self._remembered if scenario.faults.forgets else self._ledger.image()
            self._ledger = _Ledger(self._world, image)
            outcome.resumes += 1
        outcome.digest, outcome.wall_s = self._trace.hexdigest(), clock.now()
        outcome.accounting = self._ledger.accounting()
        self._observer.on_end(self._ledger, self._world)
        self._ledger.close()
        return outcome

    async def _live(self, crash_s: float | None) -> bool:
        """Run one controller to its end. False: it crashed with all workers, before the end of the run."""
        scenario, self._crashed, self._trains = self._scenario, False, "trainer"
        events = Events(clock.now, clock.wall)
        events.subscribe(self._on_event)
        seed = stream(scenario.seed, "life", self._outcome.resumes).getrandbits(60)
        runtime = self._runtime = SimRuntime(
            seed, faults=scenario.faults, latency=scenario.latency, isolate=scenario.scale.isolate
        )
        controller = Controller(
            scenario.config,
            fleet=_fleet(scenario, self._world, self._replicas),
            runtime=runtime,
            ledger=self._ledger,
            schedule=build(scenario.config),
            events=events,
            checkpoints="sim",
            export="sim/final",
            check=self._observer.on_decision,
            pace=scenario.scale.pace,
        )
        timers = self._to_be_scaled(controller)
        try:
            return await self._until(crash_s, controller)
        finally:
            for timer in timers:
                timer.cancel()
            await runtime.close()
            self._outcome.restarts += controller.restarts

    def _to_be_scaled(self, controller: Controller) -> list[asyncio.TimerHandle]:
        def ask(replicas: int) -> None:
            self._replicas = replicas
            with suppress(ConfigError):  # the run is about to end
                controller.replicas.scale(replicas)

        running, now_s = asyncio.get_running_loop(), clock.now()
        return [
            running.call_at(scaling.at_s, ask, scaling.replicas)
            for scaling in self._scenario.scalings
            if scaling.at_s >= now_s
        ]

    async def _until(self, crash_s: float | None, controller: Controller) -> bool:
        """True: the run is over. Errors of a controller that has crashed do not count."""
        running = asyncio.get_running_loop()
        timers = [] if crash_s is None else [running.call_at(crash_s, self._fall_silent)]
        try:
            async with asyncio.timeout_at(crash_s) as self._life:
                await controller.run()
        except Exception:
            if not self._crashed:
                raise
            return False
        finally:
            for timer in timers:
                timer.cancel()
        return True

    def _fall_silent(self) -> None:
        self._crashed = True
        self._observer.on_crash()

    def _on_event(self, event: Event) -> None:
        if not self._crashed:
            self._trace(event)
            kept = self._scenario.scale.keep_events
            if kept is None or event.kind in kept:
                self._outcome.events.append(event)
            self._observer.on_event(event)
            if event.kind == "step":
                self._let_strike(event.fields["version"])
            elif event.kind == "took_over":
                self._trains = event.fields["name"]
            elif event.kind == "checkpoint" and self._scenario.faults.forgets:
                self._remembered = self._ledger.image()

    def _let_strike(self, version: int) -> None:
        due = [strike for strike in self._strikes if strike.version == version]
        for strike in due:
            self._strikes.remove(strike)
            asyncio.get_running_loop().call_later(strike.after_s, self._strike, strike.workers)

    def _strike(self, workers: str) -> None:
        assert self._runtime is not None and self._life is not None
        if workers != "controller":
            self._runtime.crash(self._trains if workers == "trainer" else workers)
        elif not self._crashed:
            self._fall_silent()
            self._life.reschedule(asyncio.get_running_loop().time())


def _fleet(scenario: Scenario, world: World, replicas: int) -> Fleet:
    config, costs, workload = scenario.config, scenario.costs, scenario.workload
    rollout, scale = config.rollout, scenario.scale
    replica = {
        "world": world,
        "slots": rollout.slots,
        "kv_capacity_tokens": scale.kv_capacity_tokens or rollout.slots * rollout.max_sequence_tokens,
        "report_interval_s": scale.report_interval_s or rollout.report_interval_s,
        "progress_interval_s": scale.progress_interval_s,
        "slice_s": scale.slice_s,
        "paged": scale.paged,
        "keep_kv": config.keeps_kv,
        "costs": costs,
        "workload": workload,
        "asleep": rollout.colocated,
    }
    environment = {
        "seed": config.seed,
        "costs": costs,
        "workload": workload,
        "parallel": scale.parallel_rewards,
    }

    every = [THIS_HOST, *(f"host-{number}" for number in range(1, scenario.hosts + scenario.later_hosts))]
    hosts = every[: scenario.hosts]

    def spec(role: str, name: str, target: str, kwargs: dict[str, Any], host: str = THIS_HOST) -> WorkerSpec:
        return WorkerSpec(role, name, f"millrace_sim.roles:{target}", kwargs, Place(host=host))

    def relay(host: str) -> WorkerSpec:
        several = len(every) > 1
        kwargs = {"world": world, "slots": config.relay_slots, "costs": costs}
        name = f"relay-{host}" if several else "relay"
        return spec("relay", name, "SimRelay", kwargs | ({"address": host} if several else {}), host)

    kinds = [one for one in scenario.others for _ in range(one.num)]
    first_other = config.rollout.replicas - len(kinds)

    def replica_on(name: str, host: str, number: int) -> WorkerSpec:
        kwargs, place = dict(replica), number - first_other
        if 0 <= place < len(kinds):
            kind = kinds[place]
            kwargs |= {"costs": kind.costs, "kv_capacity_tokens": kind.kv_capacity_tokens}
        return spec("replica", name, "SimReplica", kwargs, host)

    trainer = spec("trainer", "trainer", "SimTrainer", {"world": world, "costs": costs})
    return Fleet(
        trainer=trainer,
        standby=standby_of(trainer) if config.trainer.standby else None,
        relays=tuple(map(relay, hosts)),
        replicas=tuple(replica_on(f"replica-{i}", hosts[i % len(hosts)], i) for i in range(replicas)),
        reward_workers=tuple(
            spec("reward worker", f"reward-worker-{i}", "SimRewardWorker", environment)
            for i in range(config.reward.most_workers)
        ),
        evaluator=spec("evaluator", "evaluator", "SimReplica", replica) if config.evaluations else None,
        evaluation_reward_workers=tuple(
            spec("reward worker", f"reward-worker-{one.name}", "SimRewardWorker", environment)
            for one in config.evaluations
        ),
        join=lambda names, there: [
            replica_on(name, every[number % len(every)], number)
            for number, name in enumerate(names, len(there))
        ],
        relay=relay,
    )


class TraceDigest:
    """An event sink. Reduces kind, time and sorted fields of every event to one number. Two runs with the
    same number took the same path.

    Floats enter exactly, dicts within fields in their own order. Fields must be data (numbers, strings,
    lists, dicts, structs, dataclasses): an object whose text has an address would differ from run to
    run, so it raises TypeError.
    """

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self._encode = msgspec.msgpack.Encoder().encode

    def __call__(self, event: Event) -> None:
        self._hash.update(self._encode((event.kind, event.time_s, sorted(event.fields.items()))))

    def hexdigest(self) -> str:
        return self._hash.hexdigest()
