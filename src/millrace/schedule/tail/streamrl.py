"""StreamRL: long completions start first and apart, and groups are trained in the order of their ends."""

from __future__ import annotations

from millrace.config.tables.schedules import StreamRL
from millrace.schedule.admit import WithinBound
from millrace.schedule.route import LeastLoaded
from millrace.schedule.schedule import Schedule
from millrace.schedule.tail.lengths import LongestFirst
from millrace.schedule.tail.mixing import mixing
from millrace.schedule.take import FirstReady


def streamrl(keys: StreamRL) -> Schedule:
    """StreamRL (arXiv:2504.15930): generation is a stream, and long completions are dispatched apart.

    All that the bound allows starts at once, so that a whole batch is there to be arranged (`LongestFirst`).

    Differs: a trained ranker predicts lengths in the paper, and the earlier completions of a row do here. In
    the paper the trainer computes on micro-batches while the rest of their batch is generated. Here a step
    begins when its batch is complete, and the stream is one of groups: whatever is ready first is trained
    first. docs/stragglers.md has the reason, and an estimate of the gain. The paper plans how many devices
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
