"""The published schedules and our own, as compositions of the five decisions. StaleFlow has rules of its
own: groups go where they add most throughput, and weights change where this lets more start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, assert_never

from millrace.config.objects import load_function
from millrace.config.schema import Config
from millrace.config.tables import schedules
from millrace.config.tables.schedules import Heddle, RollFlash, RollPacker, StaleFlow, StreamRL
from millrace.core.errors import ConfigError, boundary
from millrace.schedule.admit import QUEUE_ROUNDS, KVRoom, WhileNewest, WithinBound
from millrace.schedule.ahead import Ahead, TailRounds, WithCapacity
from millrace.schedule.deadlines import Deadlines
from millrace.schedule.heddle import heddle
from millrace.schedule.lengths import LongestFirst
from millrace.schedule.refresh import AtOnce, BetweenIterations, BeyondReload, WhenEmpty
from millrace.schedule.repack import BestFit, OnDemand
from millrace.schedule.route import LeastLoaded, Local, NewestOnly
from millrace.schedule.schedule import Schedule
from millrace.schedule.take import FirstReady, InOrder, OldestFirst
from millrace.schedule.view import ReplicaView, View


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
    is ROLL Flash's. Designed with the simulator, and compared with Laminar in reports/experiments.md.
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


def rlboost(*, staleness_max: int | None) -> Schedule:
    """RLBoost (arXiv:2510.19225): for replicas that come and go, such as preemptible instances.

    New groups go only to replicas with the newest weights. Each replica pulls these weights when it is empty.
    A joining replica pulls first, so it starts at the newest version. The trajectories of a preempted replica
    go on elsewhere with their tokens. The controller does this for every schedule.

    Differs: in the paper the trainer's own GPUs generate at the beginning of each step, and then hand over
    partial responses to the instances. The paper adapts this share to the number of instances. Here a trainer
    never generates. Instead the number of groups begun ahead of the trainer follows the slots of the present
    replicas (`WithCapacity`). The paper's steps are on-policy. Here the bound says how stale a group may be,
    and 0 is on-policy. The paper also moves requests to balance the load of instances. Here only trajectories
    of a leaving replica move.
    """
    return Schedule(
        kind="rlboost",
        staleness_max=staleness_max,
        admit_rule=WithinBound(QUEUE_ROUNDS),
        route_rule=NewestOnly(),
        refresh_rule=WhenEmpty(),
        take_rule=FirstReady(),
        ahead_rule=WithCapacity(staleness_max, QUEUE_ROUNDS),
    )


def from_function(path: str, config: Config) -> Schedule:
    """Raises: ConfigError: there is no such function, it fails, it returns something else, or a schedule that
    permits more staleness than `schedule.staleness_max`."""
    make, _ = load_function("schedule.path", path)
    with boundary("`schedule.path`", f"calling {path!r} with the configuration", ConfigError):
        schedule = make(config)
    if not isinstance(schedule, Schedule):
        raise ConfigError(
            f"`schedule.path` ({path!r}) returned a {type(schedule).__name__}, "
            "not a millrace.schedule.Schedule"
        )
    _refuse_looser(path, schedule.staleness_max, config.staleness_bound)
    return schedule


def _refuse_looser(path: str, bound: int | None, key: int | None) -> None:
    """The rest of a run goes by the key: what it keeps, what it promises, and what its checks permit."""
    if key is not None and (bound is None or bound > key):
        own = "no staleness bound" if bound is None else f"the staleness bound {bound}"
        more = '"none"' if bound is None else str(bound)
        raise ConfigError(
            f"`schedule.path` ({path!r}) returned a schedule with {own}, and `schedule.staleness_max` is "
            f"{key}.\n"
            f"  Give the schedule `config.staleness_bound`, or set schedule.staleness_max = {more}"
        )


Tail = RollFlash | StreamRL | StaleFlow | Heddle


def build_tail(keys: Tail) -> Schedule:
    match keys:
        case RollFlash():
            return roll_flash(keys)
        case StreamRL():
            return streamrl(keys)
        case StaleFlow():
            return staleflow(keys)
        case Heddle():
            return heddle(keys)
        case unknown:
            assert_never(unknown)


def roll_flash(keys: RollFlash) -> Schedule:
    """ROLL Flash (arXiv:2510.11345): environment-level asynchrony, redundancy, and the asynchronous ratio
    `alpha`, which is the staleness bound in versions.

    Each trajectory waits for its own environment alone: the controller does this for every schedule. A group
    starts `redundant_samples` trajectories more than it needs, and is complete with the first that have a
    reward. Up to `redundant_groups` live groups may be beyond what the trainer can train in time. It waits
    for none of them, and those that miss their deadline end.

    Differs: the paper checks alpha when a sample starts. Here the deadline of each group is kept until it is
    trained, so no token is older than alpha. What redundancy favours: docs/schedules.md.
    """
    return Schedule(
        kind="roll_flash",
        staleness_max=keys.alpha,
        admit_rule=WithinBound(QUEUE_ROUNDS),
        route_rule=LeastLoaded(),
        take_rule=FirstReady(),
        redundant_samples=keys.redundant_samples,
        redundant_groups=keys.redundant_groups,
        **mixing(keys.mix),
    )


def streamrl(keys: StreamRL) -> Schedule:
    """StreamRL (arXiv:2504.15930): generation is a stream, and long completions are dispatched apart.

    All that the bound allows starts at once, so that a whole batch is there to be arranged (`LongestFirst`).

    Differs: a trained ranker predicts lengths in the paper, and the earlier completions of a row do here. In
    the paper the trainer computes on micro-batches while the rest of their batch is generated. Here a step
    begins when its batch is complete, and the stream is one of groups: whatever is ready first is trained
    first. reports/stragglers.md has the reason, and an estimate of the gain. The paper plans how many devices
    generate; `millrace plan` does that.
    """
    return Schedule(
        kind="streamrl",
        staleness_max=keys.staleness_max,
        admit_rule=WithinBound(),
        route_rule=LeastLoaded(),
        take_rule=FirstReady(),
        pair_rule=LongestFirst(),
        **mixing(keys.mix),
    )


def rollpacker(keys: RollPacker, batch_groups: int) -> Schedule:
    """RollPacker (arXiv:2509.21009): tail batching. Synchronous: no token is older than its batch.

    A short round starts eta times the prompts, each with eta times the trajectories, and trains the first.
    The prompts left behind wait. When they make a batch, they make a long round, which starts nothing beyond
    the batch. So no prompt is left out, and few batches wait for long completions. The paper has eta = 1.25.

    Differs: two numbers take the place of eta. A group that is left behind keeps its place in the data stream
    and its trajectories. They begin again from the prompt, and the event `restarted` counts their tokens. So
    each group is trained once, and each trajectory ends once. The paper's other parts are no decisions of a
    schedule: tensor parallel sizes that change, reward workers that share devices, and training on the first
    trajectories while the others are generated. Groups that wait when the run ends are `rejected`.
    """
    redundant = -(-batch_groups // 4) if keys.redundant_groups is None else keys.redundant_groups
    return Schedule(
        kind="rollpacker",
        staleness_max=0,
        admit_rule=WithinBound(),
        route_rule=LeastLoaded(),
        refresh_rule=WhenEmpty(),
        take_rule=FirstReady(),
        ahead_rule=TailRounds(redundant),
        redundant_samples=keys.redundant_samples,
        redundant_groups=redundant,
        parks=True,
    )


def mixing(mix: Literal["within", "between", "never"]) -> dict[str, Any]:
    """The fields of a `Schedule` that say so.

    `never`: a later turn goes to a replica of its trajectory's version. If no replica serves the version, an
    empty replica takes it back. If no relay holds it any more, the trajectory and its episode begin again.
    """
    within = mix == "within"
    return {
        "mixes_versions": within,
        "one_version": mix == "never",
        "refresh_rule": AtOnce() if within else WhenEmpty(),
    }


# ---------------------------------------------------------------- StaleFlow's rules


KV_FULL = 2.0
"""A step over a full KV cache takes so many steps over an empty one longer: the cache is so many times as
large as the weights that a step reads. Assumed: 1.7 to 3.8 for 7B to 32B in bf16 on 80 to 96 GB."""
SEQUENCE_SHARE = 0.25
"""A trajectory without tokens counts with this share of the longest sequence. Assumed."""


@dataclass(frozen=True, slots=True)
class Waterfall:
    """Trajectories go where they add most throughput, while they add at least `gain_min` (the paper's mu) of
    what the first one adds to an idle replica."""

    gain_min: float

    def gain(self, view: View, replica: ReplicaView, load: int) -> float:
        """What one more trajectory adds at `load`, over what the first one adds: at most 1, and below 0 where
        it slows the others more than it gives."""
        each = self._tokens_each(view, replica)
        tokens = replica.kv_used_tokens + max(0, load - replica.running) * each
        more = _throughput(replica, load + 1, tokens + each) - _throughput(replica, load, tokens)
        return more / _throughput(replica, 1, each)

    def groups(self, view: View, replica: ReplicaView) -> int:
        """Groups that may start there now. No whole group waits for slots: it is routed later, and to
        younger weights."""
        load = replica.load
        while load < replica.slots and self.gain(view, replica, load) >= self.gain_min:
            load += view.start_size
        return (load - replica.load) // view.start_size

    def _tokens_each(self, view: View, replica: ReplicaView) -> float:
        running = replica.kv_used_tokens / replica.running if replica.running else 0.0
        return max(running, SEQUENCE_SHARE * view.max_sequence_tokens)


def _throughput(replica: ReplicaView, load: int, kv_tokens: float) -> float:
    step = KV_FULL * kv_tokens / replica.kv_capacity_tokens + max(1.0, load / replica.slots)
    return load / step


GAIN_MIN = 0.1
"""The paper's threshold mu. Its value was not found, so this one is ours."""


@dataclass(frozen=True, slots=True)
class MarginalThroughput:
    """Admit: a replica has room for a group while its trajectories add enough throughput."""

    waterfall: Waterfall

    def room(self, view: View, replica: ReplicaView) -> int:
        return self.waterfall.groups(view, replica)

    def describe(self) -> str:
        least = f"{self.waterfall.gain_min:.0%}"
        return f"within the bound, while a trajectory adds {least} of the throughput of the first one"


@dataclass(frozen=True, slots=True)
class MostGain:
    """Route: where one more trajectory adds most throughput. A replica that pulls keeps its share."""

    waterfall: Waterfall

    def rank(self, view: View, replica: ReplicaView, load: int) -> float | None:
        return -self.waterfall.gain(view, replica, load)

    def describe(self) -> str:
        return "the replica whose throughput rises most"


@dataclass(frozen=True, slots=True)
class WhenItPays:
    """Refresh: when empty, or when newer weights let the replica start more groups.

    Then the replica has room for throughput's sake, and the bound has more places at the newest version than
    at the present one. Trajectories in flight go on under the new weights. Elsewhere a pull would only cost
    their keys and values.
    """

    staleness_max: int
    waterfall: Waterfall
    discards = False

    def due(self, view: View, replica: ReplicaView) -> bool:
        if replica.load == 0:
            return True
        if not self.waterfall.groups(view, replica):
            return False
        book = Deadlines(view, self.staleness_max, view.births)
        return book.places_left(view.newest_for(replica)) > book.places_left(replica.version)

    def describe(self) -> str:
        return "when empty, or when the bound lets the replica start more groups under newer weights"


def staleflow(keys: StaleFlow) -> Schedule:
    """StaleFlow (arXiv:2601.12784): a protocol bounds each trajectory's staleness, and a coordinator routes
    for throughput.

    The protocol: each trajectory has the oldest version V that it may be of. It reserves an entry of a
    buffer, which is the batch of a version up to V + eta. A rewarded trajectory occupies its entry, and a
    full buffer is consumed. A reservation that fits no buffer is refused. Feasibility (docs/schedules.md) is
    the same condition, for all buffers at once: admission reserves, and `take` consumes the first batch.

    Differs: throughput is estimated without profiled coefficients (`throughput.py`). The paper's rule for a
    pull was not found in what we could read, so `WhenItPays` is ours. The paper also interrupts single
    trajectories, where a queue is long or where throughputs differ much, and routes them anew. Here none
    waits at a replica, and one that runs stays: a move here empties a whole replica. Groups are reserved and
    routed as a whole.
    """
    waterfall = Waterfall(GAIN_MIN)
    return Schedule(
        kind="staleflow",
        staleness_max=keys.staleness_max,
        mixes_versions=True,
        admit_rule=MarginalThroughput(waterfall),
        route_rule=MostGain(waterfall),
        refresh_rule=WhenItPays(keys.staleness_max, waterfall),
        take_rule=FirstReady(),
    )
