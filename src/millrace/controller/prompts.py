"""The stream of prompts, fetched ahead of need.

If a worker dies in a fetch, any row of the fetch may be the cause. So the rows are fetched again one by one.
A row that kills two workers is skipped, with the reason.
"""

from __future__ import annotations

import asyncio
from collections import deque

from millrace.controller.supervisor import PlannedRestart
from millrace.controller.waits import Waits
from millrace.core.errors import DataError, DeadlineExceeded, OutOfMemory, WorkerDied
from millrace.core.protocols import Handle
from millrace.core.types import BadPrompt, Prompt

PROMPT_BATCH = 16  # rows per call: few enough that PROMPTS_TIMEOUT_S is long for them
PROMPTS_TIMEOUT_S = 20.0
DEATHS_MAX = 2  # a row whose fetch killed this many workers is skipped
KILLERS_MAX = 8  # after so many such rows in a row the rows are not the cause, and the run ends
BAD_PROMPTS_MAX = 1000  # skipped prompts in a row that stop the run


class PromptStream:
    """Prompts in the order of their group ids, at least `prefetch` of them where workers keep up. One worker
    fetches at a time."""

    def __init__(self, waits: Waits, *, next_group_id: int, prefetch: int) -> None:
        self._waits, self._next_group_id, self._prefetch = waits, next_group_id, prefetch
        self._fetched: deque[Prompt | BadPrompt] = deque()
        self._fetching = False
        self._alone_until = 0  # rows below this group id are fetched one by one
        self._deaths: list[str] = []  # reasons, of workers that fetched only the next row
        self._bad = self._killers = 0  # in a row

    @property
    def wanted(self) -> bool:
        """Whether somebody should fetch."""
        return not self._fetching and len(self._fetched) < self._prefetch

    def next(self) -> Prompt | BadPrompt | None:
        """The next prompt of the stream, or None: not fetched yet.

        Raises: DataError: too many prompts in a row cannot be used, so the data must be wrong.
        """
        if not self._fetched:
            return None
        prompt = self._fetched.popleft()
        self._bad = self._bad + 1 if isinstance(prompt, BadPrompt) else 0
        if self._bad >= BAD_PROMPTS_MAX and isinstance(prompt, BadPrompt):
            raise DataError(
                f"{self._bad} prompts in a row cannot be used; the last, {prompt.row_id}: {prompt.reason}\n"
                "  Look at the data set, or raise `rollout.max_sequence_tokens`."
            )
        return prompt

    async def fetch(self, handle: Handle) -> None:
        """Fetch the next prompts from this worker. Raises: PlannedRestart: the fetch killed the worker. The
        next fetch gets the same prompts."""
        first, alone = self._next_group_id, self._next_group_id < self._alone_until
        ids = list(range(first, first + (1 if alone else PROMPT_BATCH)))
        self._fetching = True
        try:
            with self._waits.waiting(handle.name, f"prompts {ids[0]} to {ids[-1]}", bounded=True):
                fetched = await self._ask(handle, ids)
        except (WorkerDied, DeadlineExceeded, OutOfMemory) as error:
            self._suspect(ids, str(error))
            raise PlannedRestart(f"{handle.name}: lost while making prompts: {error}") from error
        except asyncio.CancelledError:  # the run ends, or the worker has missed a heartbeat
            self._suspect(ids, "its worker did not answer a heartbeat")
            raise
        finally:
            self._fetching = False
        self._next_group_id, self._deaths = ids[-1] + 1, []
        self._fetched.extend(fetched)

    async def _ask(self, handle: Handle, ids: list[int]) -> list[Prompt | BadPrompt]:
        if len(self._deaths) < DEATHS_MAX:
            fetched: list[Prompt | BadPrompt] = await handle.call("prompts", ids, timeout_s=PROMPTS_TIMEOUT_S)
            self._killers = 0
            return fetched
        row_ids = await handle.call("row_ids", ids, timeout_s=PROMPTS_TIMEOUT_S)
        reason = f"making its prompt cost {DEATHS_MAX} reward workers: {self._deaths[-1]}"
        self._count_killer(row_ids[0], reason)
        return [BadPrompt(ids[0], row_ids[0], reason)]

    def _suspect(self, ids: list[int], reason: str) -> None:
        self._alone_until = max(self._alone_until, ids[-1] + 1)
        if len(ids) == 1:
            self._deaths.append(reason)

    def _count_killer(self, row_id: str, reason: str) -> None:
        self._killers += 1
        if self._killers >= KILLERS_MAX:
            raise DataError(
                f"{self._killers} rows in a row cost their reward workers; the last, {row_id}: {reason}\n"
                "  Look at the data set. The worker's own words are in the run's logs/reward-worker-*.log."
            )
