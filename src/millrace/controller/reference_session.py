"""The reference's session: a worker that has the start weights scores groups, the awaited ones first.

It consumes ready groups, and waits for any to be ready. So most of a batch is scored while the trainer makes
the step before. A group is scored by itself: for a step that is repeated its log-probs are the same bits. If
the worker dies, another one proves its weights and goes on; the trainer waits meanwhile.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from msgspec.structs import replace

from millrace.controller.context import RunContext
from millrace.controller.groups import make_batch
from millrace.core.protocols import Handle
from millrace.core.pulse import Pulse
from millrace.core.types import Batch, TrainGroup

TICK_S = 1.0
NAME = "reference"


class ReferenceSession:
    """`run` is the session of one incarnation. What is known outlives it."""

    def __init__(self, run: RunContext) -> None:
        self._run, self._news = run, Pulse()
        self._known: dict[int, dict[int, array[float]]] = {}  # of groups, by their trajectories
        self._asked: list[TrainGroup] = []  # of the step that waits

    async def scored(self, batch: Batch) -> Batch:
        """With the reference's log-probs. The worker's deadlines bound the wait."""
        self._asked = batch.groups
        self._run.pulse.fire()
        with self._run.waits.waiting("trainer", "the reference's log-probs"):
            while any(map(self._lacks, batch.groups)):
                await self._news.wait(timeout_s=TICK_S)
        return Batch(batch.version, list(map(self._with_logprobs, batch.groups)))

    async def run(self, handle: Handle) -> None:
        """Ends with the run."""
        run = self._run
        while not (earlier := run.ledger.published(0)):
            await run.pulse.wait(timeout_s=TICK_S)
        with run.waits.waiting(NAME, "its weights to load", bounded=True):
            run.computes(NAME, await run.patience.call(handle, "load", earlier[-1].digest))
        while True:
            group = next(filter(self._lacks, self._due()), None)
            if group is None:
                await run.pulse.wait(timeout_s=TICK_S)
                continue
            with run.waits.waiting(NAME, f"group {group.group_id}", bounded=True):
                logprobs = await run.patience.call(handle, "score", group)
            self._known[group.group_id] = dict(zip(_ids(group), logprobs, strict=True))
            run.waits.progress(NAME)
            self._news.fire()

    def _due(self) -> Iterator[TrainGroup]:
        live = self._run.state.groups
        asked = {group.group_id for group in self._asked}
        for gone in self._known.keys() - live.keys() - asked:
            del self._known[gone]
        yield from self._asked
        for group_id, record in live.items():
            if record.ready_rank is not None and group_id not in self._known:
                yield from make_batch(self._run.state.version, [record.group]).groups

    def _lacks(self, group: TrainGroup) -> bool:
        """Also if a trajectory of it was rejected since it was scored: it is another group then."""
        known = self._known.get(group.group_id)
        return known is None or list(known) != _ids(group)

    def _with_logprobs(self, group: TrainGroup) -> TrainGroup:
        known = self._known[group.group_id]
        return replace(
            group, sequences=[replace(s, reference=known[s.trajectory_id]) for s in group.sequences]
        )


def _ids(group: TrainGroup) -> list[int]:
    return [sequence.trajectory_id for sequence in group.sequences]
