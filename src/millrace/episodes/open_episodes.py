"""Who owns the episodes of a worker: each that is opened is closed once, and the cause is counted."""

from __future__ import annotations

import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from math import nan

from msgspec.structs import replace

from millrace.core.completion.columns import token_array
from millrace.core.completion.forks import Fork
from millrace.core.types import Finish, Observed, ScoreRequest
from millrace.episodes.bridge import Begin
from millrace.episodes.environment import Environment, Ids
from millrace.tasks.chat import More
from millrace.tasks.rows import Row

KEPT_MAX = 4096
"""Episodes that a worker keeps between their turns. The one that waited longest is closed, and repeated."""

NO_TOKENS, NO_LOGPROBS = token_array(), array("f")
NOTHING = ScoreRequest(-1, -1, NO_TOKENS, Finish.TURN)


class Cause(StrEnum):
    """Why an episode was closed."""

    PROMPT = "it was begun for its prompt"
    ENDED = "it has ended"
    FAILED = "it has failed"
    OTHER_TOKENS = "its trajectory goes on from other tokens: it began again, or another worker went on"
    FORGOTTEN = "its trajectory needs no answer any more"
    DROPPED = "there was no room for it"
    TRIAL = "a trial restores it before its next turn"


class Episode:
    """One environment, after its last answer. `seen`: the last request, with the answer behind it. `before`:
    what its conversation began with, for the bridge. `begun`: what its environment began with."""

    def __init__(self, environment: Environment, row: Row, trajectory_id: int) -> None:
        self.environment, self.row, self.trajectory_id = environment, row, trajectory_id
        self.turns = 0
        self.reward = 0.0
        self.rewards = Counter[str]()  # by name, over the turns
        self.seconds = 0.0  # of its answers
        self.seen = NOTHING
        self.before: Begin = ()
        self.begun: More | Ids = ""


class OpenEpisodes:
    """Every method may be called from any thread. `close` takes as long as the environment's `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Episode] = OrderedDict()
        self._running: dict[int, Episode] = {}  # each begins or answers in a thread
        self.opened = 0
        self.closed: Counter[Cause] = Counter()

    def __len__(self) -> int:
        return self.opened - self.closed.total()

    def counts(self) -> dict[str, int]:
        """How many are `open`, and how many were closed, by cause."""
        with self._lock:
            closed = {cause.name.lower(): num for cause, num in self.closed.items()}
        return {"open": len(self), **closed}

    def open(self, make: Callable[[], Environment], row: Row, trajectory_id: int) -> Episode:
        episode = Episode(make(), row, trajectory_id)
        with self._lock:
            self.opened += 1
            self._running[trajectory_id] = episode
        return episode

    def keep(self, request: ScoreRequest, observed: Observed, episode: Episode) -> None:
        """Until the next turn of its trajectory."""
        episode.seen = answered(request, observed)
        with self._lock:
            others = [self._kept.pop(request.trajectory_id, None)]
            self._kept[request.trajectory_id] = episode
            self._rest(episode)
            while len(self._kept) > KEPT_MAX:
                others.append(self._kept.popitem(last=False)[1])
        for other in filter(None, others):
            self.close(other, Cause.DROPPED)

    def take(self, request: ScoreRequest) -> Episode | None:
        """The episode that the last turn of `request` goes on with; None: there is none. One of other tokens
        is closed first."""
        with self._lock:
            episode = self._kept.pop(request.trajectory_id, None)
            if episode is not None:
                self._running[request.trajectory_id] = episode
        if episode is None or goes_on(episode.seen, request):
            return episode
        self.close(episode, Cause.OTHER_TOKENS)
        return None

    def whole(self, request: ScoreRequest) -> tuple[ScoreRequest, Row] | None:
        """The request with what it leaves out, and its row; None: its episode is not here."""
        with self._lock:
            episode = self._kept.get(request.trajectory_id)
        if episode is None or len(episode.seen.tokens) != request.known:
            return None
        return joined(episode.seen, request), episode.row

    def forget(self, trajectory_ids: Sequence[int]) -> list[Episode]:
        """The episodes of these trajectories, for the caller to close."""
        with self._lock:
            kept = [self._kept.pop(trajectory_id, None) for trajectory_id in trajectory_ids]
        return [episode for episode in kept if episode is not None]

    def end_at_once(self, trajectory_ids: Sequence[int]) -> None:
        """Nobody waits for these trajectories: agents that run for them end, and so their threads are free.
        Other environments end their answer."""
        with self._lock:
            running = [self._running[one] for one in trajectory_ids if one in self._running]
        for episode in running:
            getattr(episode.environment, "end_at_once", lambda: None)()

    def _rest(self, episode: Episode) -> None:
        if self._running.get(episode.trajectory_id) is episode:
            del self._running[episode.trajectory_id]

    def close(self, episode: Episode, cause: Cause) -> None:
        with suppress(BaseException):  # not even SystemExit may leave the thread
            getattr(episode.environment, "close", lambda: None)()
        with self._lock:
            self.closed[cause] += 1
            self._rest(episode)


def answered(request: ScoreRequest, observed: Observed) -> ScoreRequest:
    """The request with the answer behind it. An episode that begins has its prompt alone."""
    if observed.begins:
        request = replace(request, tokens=NO_TOKENS, logprobs=NO_LOGPROBS, turns=[], forks=[])
    start = len(request.tokens)
    fork = [] if observed.after is None else [Fork(start, observed.after, observed.kept)]
    return replace(
        request,
        tokens=request.tokens + observed.tokens,
        logprobs=request.logprobs + array("f", (nan,)) * len(observed.tokens),
        turns=[] if observed.begins else [*request.turns, (start, start + len(observed.tokens), False)],
        forks=[*request.forks, *fork],
    )


def joined(seen: ScoreRequest, request: ScoreRequest) -> ScoreRequest:
    """The next request in full. `seen`: as of `answered`, of its last one."""
    return replace(
        request,
        tokens=seen.tokens + request.tokens,
        logprobs=seen.logprobs + request.logprobs,
        turns=seen.turns + request.turns,
        prompt=seen.prompt,
        forks=seen.forks,
        known=None,
    )


def goes_on(seen: ScoreRequest, request: ScoreRequest) -> bool:
    """Whether the last turn of a full request follows what its episode has `seen`."""
    before = request.tokens[: request.turns[-1][0]]
    return (seen.group_id, seen.prompt, seen.tokens) == (request.group_id, request.prompt, before)
