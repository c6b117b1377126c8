"""A whole run in virtual time: the real controller, schedule and ledger over simulated roles."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from millrace.config.schema import Config
from millrace.controller.controller import Controller, Fleet
from millrace.controller.state import RunState
from millrace.controller.supervisor import WorkerSpec
from millrace.core import clock
from millrace.core.events import Event, Events
from millrace.core.types import Accounting
from millrace.ledger.recovery import Recovery
from millrace.ledger.sqlite import SqliteLedger
from millrace.runtime.sim import SimRuntime
from millrace.schedule.presets import build
from millrace.sim import loop
from millrace.sim.costs import CostModel, Costs
from millrace.sim.faults import Faults, Latency
from millrace.sim.trace import TraceDigest
from millrace.sim.workload import Workload
from millrace.sim.world import World


@dataclass(frozen=True, slots=True)
class Scenario:
    """A configuration, and the world it runs in."""

    config: Config
    seed: int = 0
    costs: CostModel = Costs()
    workload: Workload = Workload()
    faults: Faults = Faults()
    latency: Latency = Latency()
    time_max_s: float = 86_400.0


@dataclass(slots=True)
class Outcome:
    """What a simulated run left behind. `digest` is of the event trace."""

    digest: str = ""
    wall_s: float = 0.0
    restarts: int = 0
    accounting: Accounting = Accounting()
    events: list[Event] = field(default_factory=list)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Fields of all events of a kind, in order."""
        return [event.fields for event in self.events if event.kind == kind]


class _Ledger(SqliteLedger):
    """In memory; checkpoints of simulated trainers are always whole."""

    def __init__(self) -> None:
        super().__init__(":memory:", run={})

    def recover(self, checkpoint_ok: object = None) -> Recovery:
        return super().recover(lambda info: True)


def simulate(scenario: Scenario, check: Callable[[RunState], None] = lambda state: None) -> Outcome:
    """Run to the end. `check` sees the controller's state after every round of decisions.

    Raises: what the run raised; DeadlockError; DeadlineExceeded past `time_max_s`.
    """
    return loop.run(_simulate(scenario, check), seed=scenario.seed, time_max_s=scenario.time_max_s)


async def _simulate(scenario: Scenario, check: Callable[[RunState], None]) -> Outcome:
    outcome, trace, ledger = Outcome(), TraceDigest(), _Ledger()
    events = Events(clock.now, clock.wall)
    events.subscribe(trace)
    events.subscribe(outcome.events.append)
    runtime = SimRuntime(scenario.seed, faults=scenario.faults, latency=scenario.latency)
    controller = Controller(
        scenario.config,
        fleet=_fleet(scenario),
        runtime=runtime,
        ledger=ledger,
        schedule=build(scenario.config),
        events=events,
        checkpoints="sim",
        check=check,
    )
    try:
        async with asyncio.timeout(scenario.time_max_s):
            await controller.run()
    finally:
        await runtime.close()
    outcome.digest, outcome.wall_s = trace.hexdigest(), clock.now()
    outcome.restarts, outcome.accounting = controller.restarts, ledger.accounting()
    ledger.close()
    return outcome


def _fleet(scenario: Scenario) -> Fleet:
    config, costs, workload = scenario.config, scenario.costs, scenario.workload
    world = World()
    rollout = config.rollout
    replica = {
        "world": world,
        "slots": rollout.slots,
        "kv_capacity_tokens": rollout.slots * rollout.max_sequence_tokens,
        "report_interval_s": rollout.report_interval_s,
        "costs": costs,
        "workload": workload,
    }
    environment = {"seed": config.seed, "costs": costs, "workload": workload}

    def spec(role: str, name: str, target: str, kwargs: dict[str, Any]) -> WorkerSpec:
        return WorkerSpec(role, name, f"millrace.sim.roles:{target}", kwargs)

    return Fleet(
        trainer=spec("trainer", "trainer", "SimTrainer", {"world": world, "costs": costs}),
        relay=spec(
            "relay", "relay", "SimRelay", {"world": world, "slots": config.relay_slots, "costs": costs}
        ),
        replicas=tuple(
            spec("replica", f"replica-{i}", "SimReplica", replica) for i in range(rollout.replicas)
        ),
        environments=tuple(
            spec("environment", f"environment-{i}", "SimEnvironment", environment)
            for i in range(config.reward.workers)
        ),
    )
