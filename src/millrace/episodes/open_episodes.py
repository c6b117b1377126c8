"""Who owns the episodes of a worker: each that is opened is closed once, and the cause is counted."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from hashlib import blake2b

from millrace.core.completion.columns import token_array
from millrace.core.types import ScoreRequest
from millrace.episodes.bridge import Begin
from millrace.episodes.environment import Environment

KEPT_MAX = 4096
"""Episodes that a worker keeps between their turns. The one that waited longest is closed, and repeated."""


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
    """One environment, after its last answer. `seen`: a digest of all that the model had seen then. `before`:
    what its conversation began with, for the bridge."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.turns = 0
        self.reward = 0.0
        self.rewards = Counter[str]()  # by name, over the turns
        self.seconds = 0.0  # of its answers
        self.seen = b""
        self.before: Begin = ()


class OpenEpisodes:
    """Every method may be called from any thread. `close` takes as long as the environment's `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Episode] = OrderedDict()
        self.opened = 0
        self.closed: Counter[Cause] = Counter()

    def __len__(self) -> int:
        return self.opened - self.closed.total()

    def open(self, make: Callable[[], Environment]) -> Episode:
        episode = Episode(make())
        with self._lock:
            self.opened += 1
        return episode

    def keep(self, request: ScoreRequest, observed: Sequence[int], episode: Episode) -> None:
        """Until the next turn of its trajectory."""
        episode.seen = _seen(request, [*request.tokens, *observed])
        with self._lock:
            others = [self._kept.pop(request.trajectory_id, None)]
            self._kept[request.trajectory_id] = episode
            while len(self._kept) > KEPT_MAX:
                others.append(self._kept.popitem(last=False)[1])
        for other in filter(None, others):
            self.close(other, Cause.DROPPED)

    def take(self, request: ScoreRequest) -> Episode | None:
        """The episode that the last turn of `request` goes on with; None: there is none. One of other tokens
        is closed first."""
        with self._lock:
            episode = self._kept.pop(request.trajectory_id, None)
        if episode is None or episode.seen == _seen(request, request.tokens[: request.turns[-1][0]]):
            return episode
        self.close(episode, Cause.OTHER_TOKENS)
        return None

    def forget(self, trajectory_ids: Sequence[int]) -> list[Episode]:
        """The episodes of these trajectories, for the caller to close."""
        with self._lock:
            kept = [self._kept.pop(trajectory_id, None) for trajectory_id in trajectory_ids]
        return [episode for episode in kept if episode is not None]

    def close(self, episode: Episode, cause: Cause) -> None:
        with suppress(BaseException):  # not even SystemExit may leave the thread
            getattr(episode.environment, "close", lambda: None)()
        with self._lock:
            self.closed[cause] += 1


def _seen(request: ScoreRequest, tokens: Sequence[int]) -> bytes:
    head = f"{request.group_id} {len(request.prompt)} ".encode()
    return blake2b(head + token_array([*request.prompt, *tokens]).tobytes(), digest_size=16).digest()
