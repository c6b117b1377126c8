"""RLBoost: what is begun follows the replicas that are there."""

from __future__ import annotations

from millrace.schedule.admit import QUEUE_ROUNDS, WithinBound
from millrace.schedule.elastic.with_capacity import WithCapacity
from millrace.schedule.refresh import WhenEmpty
from millrace.schedule.route import NewestOnly
from millrace.schedule.schedule import Schedule
from millrace.schedule.take import FirstReady


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
