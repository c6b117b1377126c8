"""StaleFlow: groups go where they add most throughput, and weights change where this lets more start."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.config.tables.schedules import StaleFlow
from millrace.schedule.deadlines import Deadlines
from millrace.schedule.schedule import Schedule
from millrace.schedule.tail.throughput import Waterfall
from millrace.schedule.take import FirstReady
from millrace.schedule.view import ReplicaView, View

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
