"""ROLL Flash: more starts than is needed, and the trainer waits for no straggler."""

from __future__ import annotations

from millrace.config.tables.schedules import RollFlash
from millrace.schedule.admit import QUEUE_ROUNDS, WithinBound
from millrace.schedule.route import LeastLoaded
from millrace.schedule.schedule import Schedule
from millrace.schedule.tail.mixing import mixing
from millrace.schedule.take import FirstReady


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
