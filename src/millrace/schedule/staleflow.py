"""StaleFlow: groups go where they add most throughput, and weights change where this lets more start."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.config.tables.schedules import StaleFlow
from millrace.schedule.deadlines import Deadlines
from millrace.schedule.schedule import Schedule
from millrace.schedule.take import FirstReady
from millrace.schedule.view import ReplicaView, View

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
