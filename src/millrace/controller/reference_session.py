"""The reference's session: a worker that has the start weights scores each batch before its step.

It waits for a batch, and the trainer waits for its answer. If the worker dies, another one proves its weights
and scores the batch anew.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from msgspec.structs import replace

from millrace.controller.context import RunContext
from millrace.core.protocols import Handle
from millrace.core.pulse import Pulse
from millrace.core.types import Batch

TICK_S = 1.0
NAME = "reference"


class ReferenceSession:
    """`run` is the session of one incarnation. What is asked outlives it."""

    def __init__(self, run: RunContext) -> None:
        self._run, self._news = run, Pulse()
        self._asked: Batch | None = None
        self._told: Batch | None = None

    async def scored(self, batch: Batch) -> Batch:
        """With the reference's log-probs."""
        self._asked, self._told = batch, None
        self._news.fire()
        with self._run.waits.waiting("trainer", "the reference's log-probs"):
            while self._told is None:
                await self._news.wait(timeout_s=TICK_S)
        return self._told

    async def run(self, handle: Handle) -> None:
        """Ends with the run."""
        run = self._run
        while not (published := run.ledger.published(0)):
            await run.pulse.wait(timeout_s=TICK_S)
        with run.waits.waiting(NAME, "its weights to load", bounded=True):
            run.computes(NAME, await run.patience.call(handle, "load", published[-1].digest))
        while True:
            batch = self._asked
            if batch is None:
                await self._news.wait(timeout_s=TICK_S)
                continue
            with run.waits.waiting(NAME, f"the batch of version {batch.version}", bounded=True):
                found = await run.patience.call(handle, "score", batch)
            if batch is self._asked:  # else the trainer died meanwhile, and its next one asks again
                self._asked, self._told = None, _with(batch, found)
                run.waits.progress(NAME)
                self._news.fire()


def _with(batch: Batch, found: Sequence[array[float]]) -> Batch:
    left = iter(found)
    return Batch(
        batch.version,
        [
            replace(group, sequences=[replace(s, reference=next(left)) for s in group.sequences])
            for group in batch.groups
        ],
    )
