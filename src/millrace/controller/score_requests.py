"""Requests that wait for a reward worker, and which worker may serve which. No I/O.

With one *lane* a worker serves a batch of requests, one after the other. An environment may take minutes
for an answer, so its worker has many lanes, each with one request.

The worker that has an episode answers all its turns: another worker would have to repeat the episode. If a
worker with several lanes dies, any of its requests may be the cause. They are *suspects*, and each is then
served alone, and so is the next one of an episode that began again instead.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from itertools import count

from msgspec.structs import replace

from millrace.core.completion.columns import token_array
from millrace.core.errors import RewardError
from millrace.core.protocols import Handle
from millrace.core.types import Failed, Observed, Score, ScoreRequest

BATCH = 16
"""Requests per call with one lane: enough to hide the call, few enough to spread over workers."""

DEATHS_MAX = 2
"""A request that killed this many workers has failed."""


FAILURES_MAX = 256
"""Failed scores in a row that stop the run."""

NOTHING = token_array()

ANY, SUSPECTS = "", "*"
"""In place of the name of a worker."""


class ScoreRequests:
    """A request is in one place: it waits, or one worker has taken it. `lanes`: calls of a worker at once."""

    def __init__(self, lanes: int) -> None:
        self._lanes, self._several, self._most = lanes, lanes > 1, 1 if lanes > 1 else BATCH
        # The requests that one worker may serve, with their places: the lowest place is the oldest.
        self._waiting: defaultdict[str, deque[tuple[int, ScoreRequest]]] = defaultdict(deque)
        self._last_places, self._first_places = count(), count(-1, -1)
        self._calls = Counter[str]()  # of each worker
        self._taken: dict[str, dict[int, ScoreRequest]] = {}  # by worker and trajectory
        self._homes: dict[int, str] = {}  # trajectory -> the worker that has its episode
        self._known: dict[int, int] = {}  # trajectory -> its tokens that this worker has
        self._since: dict[int, float] = {}  # trajectory -> when its episode began, with the prompt
        self._suspects, self._deaths = set[int](), Counter[int]()
        self._alone = set[str]()  # workers that serve a suspect
        # By worker: trajectories whose episodes it is to end, and those that it is being told of.
        self._ended: dict[str, list[int]] = {}
        self._telling: dict[str, list[int]] = {}
        self._restarted: dict[str, list[int]] = {}  # as `_ended`; the trajectories go on
        self._failures = 0  # in a row
        self._forgotten = set[int]()  # trajectories whose answer is on its way, and nobody waits for it

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def waits_for(self, worker: str) -> bool:
        """Whether a request waits that this worker may serve, when it has a lane."""
        return bool(self._waiting[worker] or self._waiting[ANY] or self._waiting[SUSPECTS])

    @property
    def num_busy(self) -> int:
        """Workers that score."""
        return len(+self._calls)

    def is_busy(self, worker: str) -> bool:
        return self._calls[worker] > 0

    def put(self, request: ScoreRequest) -> str:
        """Returns the worker that is to serve the request; ANY: every worker may."""
        home = self._homes.get(request.trajectory_id, ANY)
        self._waiting[home].append((next(self._last_places), request))
        return home

    def is_alone(self, worker: str) -> bool:
        """Whether a worker serves a suspect, so that nothing else may end the worker."""
        return worker in self._alone

    def may_begin(self, handle: Handle) -> bool:
        """Whether this worker may begin episodes now, to know their prompt. Suspects go first."""
        mine = any(one.trajectory_id in self._suspects for _, one in self._waiting[handle.name])
        suspects = mine or self._waiting[SUSPECTS] or self.is_alone(handle.name)
        return not (suspects or handle.dead.done()) and self._calls[handle.name] < self._lanes

    def begin(self, worker: str, lanes: int) -> None:
        """The worker begins episodes in so many lanes, to know their prompt. `end` follows, unless the worker
        is lost."""
        self._calls[worker] += lanes

    def end(self, worker: str, lanes: int) -> None:
        self._calls[worker] -= lanes

    def begun(self, worker: str, ids: Sequence[int], since_s: float) -> None:
        """The worker has the episodes of these trajectories, which began with the prompt of their group. That
        of the first has its prompt: if it begins again, it counts from then."""
        self._homes |= dict.fromkeys(ids, worker)
        self._known |= dict.fromkeys(ids, 0)
        self._since |= dict.fromkeys(ids[1:], since_s)

    def forget(self, ids: Collection[int]) -> set[str]:
        """These trajectories need no answer any more. Returns the workers that are to end an episode."""
        workers, gone = set[str](), frozenset(ids)
        for name, waiting in self._waiting.items() if ids else ():
            self._waiting[name] = deque(one for one in waiting if one[1].trajectory_id not in gone)
        for trajectory_id in ids:
            self._suspects.discard(trajectory_id)
            self._deaths.pop(trajectory_id, None)
            self._since.pop(trajectory_id, None)
            busy = next((name for name, taken in self._taken.items() if trajectory_id in taken), ANY)
            if busy != ANY:
                self._forgotten.add(trajectory_id)
            if self._several:
                self._known.pop(trajectory_id, None)
                workers.add(home := self._homes.pop(trajectory_id, busy))
                self._ended.setdefault(home, []).append(trajectory_id)
        return workers

    def restart(self, trajectory_id: int) -> str:
        """A trajectory that waits for no answer begins again. The worker that has its episode closes the
        episode before it serves the next request. Returns the worker; ANY: there is no episode."""
        self._known.pop(trajectory_id, None)
        home = self._homes.get(trajectory_id, ANY)
        if home != ANY:
            self._restarted.setdefault(home, []).append(trajectory_id)
        return home

    def ended(self, worker: str) -> list[int]:
        """The trajectories whose episodes this worker is to end. `told` follows, unless the worker is
        lost."""
        ended = self._ended.pop(worker, []) + self._ended.pop(ANY, [])
        self._telling.setdefault(worker, []).extend(ended)
        return ended + self._restarted.pop(worker, [])

    def told(self, worker: str) -> None:
        """The worker has ended what `ended` gave."""
        self._telling.pop(worker, None)

    def take(self, handle: Handle) -> list[ScoreRequest]:
        """What this worker is to serve in one call, the oldest first; empty: nothing now. `give_back` ends
        the call."""
        if taken := self._for(handle):
            self._calls[handle.name] += 1
            mine = self._taken.setdefault(handle.name, {})
            for one in taken:
                mine[one.trajectory_id] = one
        return taken

    def _for(self, handle: Handle) -> list[ScoreRequest]:
        worker, waiting = handle.name, self._waiting
        if worker in self._alone or (self._several and handle.dead.done()):
            return []
        own, shared = waiting[worker], waiting[ANY]
        if alone := own if own and own[0][1].trajectory_id in self._suspects else waiting[SUSPECTS]:
            if self.is_busy(worker):
                return []
            self._alone.add(worker)
            return [alone.popleft()[1]]
        taken = list[ScoreRequest]()
        if self._calls[worker] < self._lanes:
            while len(taken) < self._most and (own or shared):
                is_own = own and not (shared and shared[0][0] < own[0][0])
                taken.append((own if is_own else shared).popleft()[1])
        return taken

    def short(self, worker: str, request: ScoreRequest) -> ScoreRequest:
        """The request without what its worker knows, if it has the episode."""
        known = self._known.get(request.trajectory_id)
        if known is None or self._homes.get(request.trajectory_id) != worker or request.begins:
            return request
        start, stop, _ = request.turns[-1]
        if start != known:
            return request
        return replace(
            request,
            tokens=request.tokens[start:stop],
            logprobs=request.logprobs[start:stop],
            turns=request.turns[-1:],
            prompt=NOTHING,
            forks=[],
            known=known,
        )

    def give_back(self, worker: str, unanswered: Sequence[ScoreRequest]) -> None:
        """A call of `worker` has ended, and these requests wait again."""
        self._calls[worker] -= 1
        self._alone.discard(worker)
        for one in unanswered:
            self._taken[worker].pop(one.trajectory_id)
        self._wait_again(reversed(unanswered))

    def since(self, trajectory_id: int, asked_s: float) -> float:
        """When what is answered now began: with its request, or before."""
        return self._since.pop(trajectory_id, asked_s)

    def answered(self, worker: str, trajectory_id: int, answer: Score | Observed) -> None:
        """Raises: RewardError: too many failed in a row."""
        request, is_wanted = self._taken[worker].pop(trajectory_id), trajectory_id not in self._forgotten
        self._forgotten.discard(trajectory_id)
        if not (isinstance(answer, Observed) and answer.begins):  # what began again may kill again
            self._deaths.pop(trajectory_id, None)
            self._suspects.discard(trajectory_id)
        if isinstance(answer, Observed):
            self._homes[trajectory_id] = worker
            before = 0 if answer.begins else len(request.tokens)
            self._known[trajectory_id] = before + len(answer.tokens)
        else:
            self._homes.pop(trajectory_id, None)
            self._known.pop(trajectory_id, None)
        if is_wanted:  # its worker ends what nobody waits for
            self._failures = self._failures + 1 if isinstance(answer, Failed) else 0
        if self._failures >= FAILURES_MAX and isinstance(answer, Failed):
            raise RewardError(
                f"{self._failures} rewards in a row failed, the last: {answer.reason}\n"
                "  Try it alone with `millrace try-task CONFIG`."
            )

    def died(self, worker: str, trajectory_id: int) -> bool:
        """The request of a trajectory was served when `worker` died. Returns whether the request has failed:
        one death may have another cause, two may not."""
        if self._several and worker not in self._alone:
            self._suspects.add(trajectory_id)
            return False
        self._deaths[trajectory_id] += 1
        return self._deaths[trajectory_id] >= DEATHS_MAX

    def _wait_again(self, requests: Iterable[ScoreRequest]) -> None:
        for one in requests:
            if one.trajectory_id in self._forgotten:
                self._forgotten.discard(one.trajectory_id)
            else:
                is_suspect = one.trajectory_id in self._suspects
                queue = SUSPECTS if is_suspect else self._homes.get(one.trajectory_id, ANY)
                self._waiting[queue].appendleft((next(self._first_places), one))

    def left(self, worker: str) -> None:
        """The worker is gone, with its episodes: other workers repeat them. A call that was cancelled before
        it began has not given back its requests."""
        self._wait_again(self._taken.pop(worker, {}).values())
        self._calls.pop(worker, None)
        self._alone.discard(worker)
        ended = self._telling.pop(worker, []) + self._ended.pop(worker, [])
        self._ended.setdefault(ANY, []).extend(ended)  # they may have left snapshots
        self._restarted.pop(worker, None)
        self._homes = {tid: name for tid, name in self._homes.items() if name != worker}
        self._known = {tid: known for tid, known in self._known.items() if tid in self._homes}
        self._since = {tid: since_s for tid, since_s in self._since.items() if tid in self._homes}
        self._waiting[ANY] = deque(sorted([*self._waiting.pop(worker, ()), *self._waiting[ANY]]))
