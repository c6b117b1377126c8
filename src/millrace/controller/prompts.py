"""The stream of prompts, fetched ahead of need.

With one *lane* one worker fetches at a time, several rows a call. The begin of an episode may take as long as
`reward.timeout_s`: an agent starts, and asks. So with several lanes each call has one row, and a worker makes
some calls at once. The worker itself ends a begin that takes too long, and says so: the row is skipped alone.

If a worker dies in a fetch, any row that it fetches may be the cause. So each of these rows is fetched again
while its worker fetches no other. A row that kills two workers so is skipped, with the reason.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from heapq import heappop, heappush

from millrace.controller.state.groups import members_of
from millrace.controller.supervisor import PlannedRestart
from millrace.controller.waits import Waits
from millrace.core.errors import DataError, DeadlineExceeded, OutOfMemory, WorkerDied
from millrace.core.protocols import Handle
from millrace.core.types import BadPrompt, Prompt

PROMPT_BATCH = 16  # rows per call with one lane: few enough that PROMPTS_TIMEOUT_S is long for them
PROMPT_LANES = 16  # calls of one worker at once, if there are several lanes
PROMPT_EPISODES = 48  # episodes that begin with these: turns have other lanes
PROMPTS_TIMEOUT_S = 20.0  # to make the rows of a call with one lane
DEATHS_MAX = 2  # a row whose fetch killed this many workers is skipped
KILLERS_MAX = 8  # after so many such rows in a row the rows are not the cause, and the run ends
BAD_PROMPTS_MAX = 1000  # skipped prompts in a row that stop the run


class PromptStream:
    """Prompts in the order of their group ids, at least `prefetch` of them where workers keep up.

    A row is in one place: nobody has asked for it, it is under way, it was lost, or it is fetched. `begin_s`:
    the deadline of a call that begins an episode, as of every call of its worker: else others would be late
    before a row that holds their worker. None: rows are no episodes, and there is one lane. `group_size`:
    the trajectories of a group go on with episodes that begin with its prompt; None: they begin later."""

    def __init__(
        self,
        waits: Waits,
        *,
        next_group_id: int,
        prefetch: int,
        begin_s: float | None = None,
        group_size: int | None = None,
    ) -> None:
        self._waits, self._prefetch, self._group_size = waits, prefetch, group_size
        self._several, self._timeout_s = begin_s is not None, begin_s or PROMPTS_TIMEOUT_S
        self._calls_max = max(1, min(PROMPT_LANES, PROMPT_EPISODES // (group_size or 1)))
        self._first = self._next_group_id = next_group_id  # of the stream, and of those not asked for
        self._fetched: dict[int, Prompt | BadPrompt] = {}
        self._under_way: defaultdict[str, set[int]] = defaultdict(set)  # by worker
        self._num_under_way = 0
        self._lost: list[int] = []  # a heap
        self._suspects: set[int] = set()  # rows that were lost: no other is fetched beside them
        self._deaths: defaultdict[int, list[str]] = defaultdict(list)  # of workers with a suspect: reasons
        self._bad = self._killers = 0  # in a row

    @property
    def is_short(self) -> bool:
        """Whether rows are to be fetched."""
        num_here = len(self._fetched) + self._num_under_way
        return bool(self._prefetch and self._lost) or num_here < self._prefetch

    def end(self) -> None:
        """No more prompts are wanted."""
        self._prefetch = 0

    def next(self) -> Prompt | BadPrompt | None:
        """The next prompt of the stream, or None: not fetched yet.

        Raises: DataError: too many prompts in a row cannot be used, so the data must be wrong.
        """
        prompt = self._fetched.pop(self._first, None)
        if prompt is None:
            return None
        self._first += 1
        self._bad = self._bad + 1 if isinstance(prompt, BadPrompt) else 0
        if self._bad >= BAD_PROMPTS_MAX and isinstance(prompt, BadPrompt):
            raise DataError(
                f"{self._bad} prompts in a row cannot be used; the last, {prompt.row_id}: {prompt.reason}\n"
                "  Look at the data set, or raise `rollout.max_sequence_tokens`."
            )
        return prompt

    # ------------------------------------------------------------ which worker fetches what

    def wanted(self, worker: str) -> bool:
        """Whether this worker should fetch."""
        if not self.is_short or (not self._several and self._num_under_way):
            return False
        mine = self._under_way[worker]
        return not mine if self._lost else len(mine) < self._calls_max and not mine & self._suspects

    def take(self, worker: str) -> list[int]:
        """The rows of one call, which `wanted` allows. `fetch` or `left` follows."""
        if self._lost:
            ids = [heappop(self._lost)]
        else:
            first = self._next_group_id
            self._next_group_id += 1 if self._several else PROMPT_BATCH
            ids = list(range(first, self._next_group_id))
        self._under_way[worker].update(ids)
        self._num_under_way += len(ids)
        return ids

    def left(self, worker: str) -> None:
        """The worker is gone, and with it calls that were cancelled before they began."""
        self._lose(worker, [*self._under_way[worker]])

    async def fetch(self, handle: Handle, ids: list[int]) -> list[Prompt | BadPrompt]:
        """Fetch these prompts from this worker. Raises: PlannedRestart: the fetch killed the worker. A later
        fetch gets the same prompts."""
        try:
            with self._waits.waiting(handle.name, f"prompts {ids[0]} to {ids[-1]}", bounded=True):
                fetched = await self._ask(handle, ids)
        except (WorkerDied, DeadlineExceeded, OutOfMemory) as error:
            self._lose(handle.name, ids, str(error))
            raise PlannedRestart(f"{handle.name}: lost while making prompts: {error}") from error
        except asyncio.CancelledError:  # the run ends, a heartbeat was missed, or another call failed
            self._lose(handle.name, ids, "" if self._several else "its worker did not answer a heartbeat")
            raise
        self._arrived(handle.name, ids)
        self._fetched.update(zip(ids, fetched, strict=True))
        return fetched

    async def _ask(self, handle: Handle, ids: list[int]) -> list[Prompt | BadPrompt]:
        deaths = self._deaths.get(ids[0], [])
        if len(deaths) < DEATHS_MAX:
            size, timeout_s = self._group_size, self._timeout_s
            asked = ids, [members_of(group_id, size) for group_id in ids if size is not None]
            fetched: list[Prompt | BadPrompt] = await handle.call("prompts", *asked, timeout_s=timeout_s)
            self._killers = 0
            return fetched
        row_ids = await handle.call("row_ids", ids, timeout_s=PROMPTS_TIMEOUT_S)
        reason = f"making its prompt cost {DEATHS_MAX} reward workers: {deaths[-1]}"
        self._killers += 1
        if self._killers >= KILLERS_MAX:
            raise DataError(
                f"{self._killers} rows in a row cost their reward workers; the last, {row_ids[0]}: {reason}\n"
                "  Look at the data set. The worker's own words are in the run's logs/reward-worker-*.log."
            )
        return [BadPrompt(ids[0], row_ids[0], reason)]

    def _lose(self, worker: str, ids: Iterable[int], reason: str = "") -> None:
        """The rows are fetched again. `reason`: why the worker was lost, if these rows may be the cause."""
        for group_id in ids:
            if reason and group_id in self._suspects:
                self._deaths[group_id].append(reason)
            self._suspects.add(group_id)
            heappush(self._lost, group_id)
        self._arrived(worker, ids)

    def _arrived(self, worker: str, ids: Iterable[int]) -> None:
        """These rows are under way no more."""
        before = len(self._under_way[worker])
        self._under_way[worker].difference_update(ids)
        self._num_under_way += len(self._under_way[worker]) - before
