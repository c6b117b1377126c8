"""The reference's session: a worker that has the start weights scores each batch before its step.

The session waits for a batch, and the trainer's session waits for the log-probs. If the worker dies, the next
incarnation proves its weights and scores the batch again.
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
    """`run` is the session of one incarnation. The batch to score outlives the incarnation."""

    def __init__(self, run: RunContext) -> None:
        self._run, self._news = run, Pulse()
        self._unscored: Batch | None = None
        self._scored: Batch | None = None

    async def scored(self, batch: Batch) -> Batch:
        """`batch` with the reference's log-probs."""
        self._unscored, self._scored = batch, None
        self._news.fire()
        with self._run.waits.waiting("trainer", "the reference's log-probs"):
            while self._scored is None:
                await self._news.wait(timeout_s=TICK_S)
        return self._scored

    async def run(self, handle: Handle) -> None:
        """Ends with the run."""
        run = self._run
        while not (published := run.ledger.version_records(0)):
            await run.pulse.wait(timeout_s=TICK_S)
        with run.waits.waiting(NAME, "its weights to load", bounded=True):
            run.computes(NAME, await run.patience.call(handle, "load", published[-1].digest))
        while True:
            batch = self._unscored
            if batch is None:
                await self._news.wait(timeout_s=TICK_S)
                continue
            with run.waits.waiting(NAME, f"the batch of version {batch.version}", bounded=True):
                logprobs = await run.patience.call(handle, "score", batch)
            if batch is self._unscored:  # otherwise the trainer died meanwhile, and its successor asks again
                self._unscored, self._scored = None, _with_reference(batch, logprobs)
                run.waits.progress(NAME)
                self._news.fire()


def _with_reference(batch: Batch, logprobs: Sequence[array[float]]) -> Batch:
    columns = iter(logprobs)
    return Batch(
        batch.version,
        [
            replace(group, sequences=[replace(s, reference=next(columns)) for s in group.sequences])
            for group in batch.groups
        ],
    )
