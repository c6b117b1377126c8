"""An own schedule, and a rehearsal that shows what it is worth.

    python examples/schedule.py
    millrace train CONFIG --set schedule.kind=function --set schedule.path=examples/schedule.py:make

A schedule is five decisions: admit, route, refresh, repack, take. Take over what you like from the
presets, write what you do not find. Here: the schedule of RLBoost (arXiv:2510.19225) for a fleet of
replicas that come and go. New groups start only on replicas that serve the newest weights, each replica
pulls newer weights by itself (here: when it has nothing left to do), and the trainer takes what is ready.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from millrace.checks.rehearsal import Scene, rehearse
from millrace.config.schema import Config
from millrace.schedule import ReplicaView, Schedule, View, presets
from millrace.schedule.admit import WithinBound
from millrace.schedule.refresh import WhenEmpty
from millrace.schedule.take import FirstReady


@dataclass(frozen=True)
class NewestOnly:
    """Route: the least loaded of the replicas that serve the newest weights."""

    # A rule is a plain object with one decision and one line about itself; it needs no base class. It sees
    # one `View` and keeps nothing between calls: what it decides is a function of what it is shown, which
    # is why it can be simulated, rehearsed, and resumed after a crash.

    def rank(self, view: View, replica: ReplicaView, load: int) -> float | None:
        # None: not here. Lower goes first. A replica that is pulling right now is shown as it will be,
        # so with this line it keeps its share of new groups; `if replica.busy` would not wait.
        return None if replica.version < view.newest else load / replica.slots

    def describe(self) -> str:
        return "least loaded of the replicas with the newest weights"


def newest_only(*, staleness_max: int) -> Schedule:
    """The composition. The bound is not a rule's affair: `Schedule` keeps it for every composition."""
    return Schedule(
        kind="newest_only",
        staleness_max=staleness_max,
        mixes_versions=False,  # WhenEmpty never swaps weights under a trajectory
        admit_rule=WithinBound(rounds_max=2),
        route_rule=NewestOnly(),
        refresh_rule=WhenEmpty(),
        take_rule=FirstReady(),
    )


def make(config: Config) -> Schedule:
    """What `schedule.path` names: it sees the whole configuration and returns the schedule."""
    return newest_only(staleness_max=config.staleness_bound or 0)


def main() -> None:
    # Four replicas, with crashes. A rehearsal raises BrokenPromise if a batch is too old, if a trajectory
    # mixes versions, or if the run gets stuck. So a printed line means that its schedule passed.
    scene = Scene(steps=30, batch_groups=4, replicas=4, crash_probability=0.01)
    for schedule in (newest_only(staleness_max=3), presets.areal(eta=3), presets.synchronous()):
        staleness: Counter[int] = Counter()
        ticks = discarded = 0
        for seed in range(10):
            outcome = rehearse(schedule, scene, seed=seed)
            staleness.update(outcome.staleness.values())
            ticks, discarded = ticks + outcome.ticks, discarded + outcome.discarded_tokens
        share = ", ".join(f"{s}: {n / staleness.total():.0%}" for s, n in sorted(staleness.items()))
        print(f"{schedule.kind:12s} {ticks:6d} ticks, {discarded:4d} tokens lost, staleness {share}")


if __name__ == "__main__":
    main()
