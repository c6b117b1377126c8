"""The published schedules and our own, as compositions of the five decisions."""

from __future__ import annotations

from millrace.config.schema import Config
from millrace.config.tables import schedules
from millrace.schedule.admit import QUEUE_ROUNDS, KVRoom, WhileNewest, WithinBound
from millrace.schedule.ahead import Ahead
from millrace.schedule.elastic.rlboost import rlboost
from millrace.schedule.own.from_function import from_function
from millrace.schedule.refresh import AtOnce, BetweenIterations, BeyondReload, WhenEmpty
from millrace.schedule.repack import BestFit
from millrace.schedule.repack_demand import OnDemand
from millrace.schedule.route import LeastLoaded, Local
from millrace.schedule.schedule import Schedule
from millrace.schedule.tail.build import build_tail
from millrace.schedule.tail.rollpacker import rollpacker
from millrace.schedule.take import FirstReady, InOrder, OldestFirst


def build(config: Config) -> Schedule:
    """The schedule that `config.schedule` names, with what it derives from batch and rollout."""
    match config.schedule:
        case schedules.Synchronous():
            return synchronous()
        case schedules.LlamaRL() as knobs:
            derived = -(-config.sampling.max_tokens // (knobs.lag + 1))
            return llamarl(lag=knobs.lag, iteration_tokens=knobs.iteration_tokens or derived)
        case schedules.AReaL() as knobs:
            return areal(eta=knobs.eta)
        case schedules.RLAX() as knobs:
            return rlax(
                reload_staleness=knobs.reload_staleness, acceptance_staleness=knobs.acceptance_staleness
            )
        case schedules.Laminar() as knobs:
            repack = BestFit(knobs.repack_interval_s, knobs.kv_fraction_max, knobs.batch_max)
            return laminar(
                staleness_max=knobs.staleness_max,
                round_groups=knobs.round_groups,
                batch_max=knobs.batch_max,
                repack=repack if knobs.repack else None,
            )
        case schedules.Millrace() as knobs:
            return millrace(knobs)
        case schedules.RLBoost() as knobs:
            return rlboost(staleness_max=knobs.staleness_max)
        case schedules.RollPacker() as knobs:
            return rollpacker(knobs, config.batch.prompts)
        case schedules.FunctionSchedule() as function:
            return from_function(function.path, config)
        case keys:
            return build_tail(keys)


def synchronous() -> Schedule:
    """Generate a batch, train on it, hand out the new weights, generate the next. Staleness 0.

    The bound is the barrier. Under S = 0 a group may start only on a replica that serves the version at which
    the batch will be trained, and only B groups may be live. The replicas wait for the trainer, and the
    trainer waits for the slowest trajectory.
    """
    return Schedule(
        kind="synchronous",
        staleness_max=0,
        admit_rule=WithinBound(),
        route_rule=LeastLoaded(),
        refresh_rule=WhenEmpty(),
        take_rule=FirstReady(),
    )


def llamarl(*, lag: int, iteration_tokens: int) -> Schedule:
    """LlamaRL (arXiv:2505.24034): generation runs `lag` batches ahead; partial rollout between iterations.

    Differs: the paper runs generator and trainer in lockstep, and that bounds the lag. Here replicas iterate
    independently of each other, and admission bounds the lag.
    """
    return Schedule(
        kind="llamarl",
        staleness_max=lag,
        mixes_versions=True,
        admit_rule=WithinBound(QUEUE_ROUNDS),
        route_rule=LeastLoaded(),
        refresh_rule=BetweenIterations(iteration_tokens),
        take_rule=FirstReady(),
    )


def areal(*, eta: int) -> Schedule:
    """AReaL (arXiv:2505.24298): interruptible generation, staleness at most `eta`, oldest first.

    Differs: the paper's formula `N_r <= B (i + eta + 1)` counts as if every birth were the current version i.
    So it bounds staleness only where trajectories complete in the order of their start. Counting by birth
    keeps the bound for any order, and equals the formula where all births are i.
    """
    return Schedule(
        kind="areal",
        staleness_max=eta,
        mixes_versions=True,
        admit_rule=WithinBound(QUEUE_ROUNDS),
        route_rule=LeastLoaded(),
        refresh_rule=AtOnce(),
        take_rule=OldestFirst(),
    )


def rlax(*, reload_staleness: int, acceptance_staleness: int) -> Schedule:
    """RLAX (arXiv:2512.06392): one staleness at which replicas must reload, and one that the trainer accepts.

    Differs: the paper refuses rollouts beyond the acceptance staleness when they arrive. Here a group starts
    only if it will be accepted, so only faults lead to refusals. Discarded trajectories restart.
    """
    return Schedule(
        kind="rlax",
        staleness_max=acceptance_staleness,
        admit_rule=WithinBound(QUEUE_ROUNDS),
        route_rule=LeastLoaded(),
        refresh_rule=BeyondReload(reload_staleness),
        take_rule=FirstReady(),
    )


def laminar(
    *, staleness_max: int | None, round_groups: int | None, batch_max: int | None, repack: BestFit | None
) -> Schedule:
    """Laminar (arXiv:2510.12633): each replica at its own pace and version; repack empties the slow ones.

    Differs: the paper has no bound (`staleness_max` None) and reports a staleness of at most 4. With a bound,
    admission respects the bound, and the batch waits for groups at their deadline.
    """
    return Schedule(
        kind="laminar",
        staleness_max=staleness_max,
        admit_rule=KVRoom(round_groups, batch_max),
        route_rule=Local(),
        refresh_rule=WhenEmpty(),
        take_rule=FirstReady(),
        repack_rule=repack,
    )


def millrace(keys: schedules.Millrace) -> Schedule:
    """Laminar's trajectories of one version, with other rules to admit, repack and take.

    A replica on the newest weights keeps its slots full until newer weights exist; then it runs empty. Repack
    empties only as many replicas as new groups need, onto the emptiest replica and not the fullest.
    Generation runs as far ahead as the trainer needs (`Ahead`), and batches are fair (`InOrder`). Redundancy
    is ROLL Flash's. Designed with the simulator, and compared with Laminar in docs/experiments.md.
    """
    ahead_rule = Ahead(keys.staleness_max, keys.ahead)
    return Schedule(
        kind="millrace",
        staleness_max=keys.staleness_max,
        admit_rule=WhileNewest(),
        route_rule=Local(),
        refresh_rule=WhenEmpty(),
        take_rule=InOrder(),
        repack_rule=OnDemand(keys.repack_interval_s, ahead_rule, keys.batch_max),
        ahead_rule=ahead_rule,
        one_version=keys.mix == "never",
        redundant_samples=keys.redundant_samples,
        redundant_groups=keys.redundant_groups,
    )
