"""RollPacker: prompts whose completions turn out long are gathered into rounds of their own."""

from __future__ import annotations

from millrace.config.tables.schedules import RollPacker
from millrace.schedule.admit import WithinBound
from millrace.schedule.refresh import WhenEmpty
from millrace.schedule.route import LeastLoaded
from millrace.schedule.schedule import Schedule
from millrace.schedule.tail.rounds import TailRounds
from millrace.schedule.take import FirstReady


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
