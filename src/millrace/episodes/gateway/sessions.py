"""The calls of one trajectory, between the thread that serves HTTP and the thread of an environment.

The server submits calls. The environment takes the calls in order of arrival, and answers each call once. A
retry of an SDK joins the call that it repeats. So a retry is no turn.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from millrace.episodes.gateway.calls import Call, RefusedCall, Reply

CALLS_OPEN_MAX = 64
"""Calls of one session that may wait at once."""
CALLS_OPEN_S = 15
"""In this time some of them get their replies. Less than an environment waits for the next call."""
REPLIES_KEPT_MAX = 64
KEPT_S = 600.0
"""Replies are kept for retries so long. Keys of ended sessions are remembered so long."""
CLOSING_TEXT = "This episode has ended."

Outcome = Reply | RefusedCall


@dataclass(slots=True)
class CallCounts:
    """`calls` are all but retries. `joined` and `replayed`: retries of running and of answered calls.
    `closed`: calls after `conclude`. `auxiliary`: requests that are no calls."""

    calls: int = 0
    joined: int = 0
    replayed: int = 0
    closed: int = 0
    refused: int = 0
    auxiliary: int = 0


def closing_reply(text: str = "", model: str = "") -> Reply:
    """A reply that was not sampled. The reply ends an agent's loop: it has text, and calls no tool."""
    text = text if text.strip() else CLOSING_TEXT
    name = f"closing{secrets.token_hex(8)}"
    return Reply(id=name, created=int(time.time()), model=model, text=text, content=text)


def call_name(path: str, body: bytes, idempotency_key: str = "") -> bytes:
    """Equal for a call and its retries."""
    digest = blake2b(body, digest_size=16)
    digest.update(f"\n{path}\n{idempotency_key}".encode(errors="replace"))
    return digest.digest()


class PendingCall:
    """A call that waits for its reply. The first outcome counts, and a later outcome changes nothing."""

    def __init__(self, session: Session, call: Call, name: bytes) -> None:
        self.call, self.name = call, name
        self.outcome: Outcome | None = None
        self.delivered = False
        """A connection has taken the whole reply."""
        self.watchers: list[Callable[[], None]] = []
        self.was_watched = False
        self._session = session

    @property
    def awaited(self) -> bool:
        """Whether a connection waits for the reply. If not, the agent may yet send the call again."""
        return bool(self.watchers)

    @property
    def is_lost(self) -> bool:
        """A connection has waited, and has ended without the reply."""
        return self.was_watched and not self.watchers and not self.delivered

    def answer(self, reply: Reply) -> bool:
        """Returns whether the reply is the outcome."""
        return self._session.settle(self, reply)

    def refuse(self, refusal: RefusedCall) -> bool:
        """A retry, where the refusal permits one, is a new call."""
        return self._session.settle(self, refusal)


class Session:
    """One trajectory, and the key that its agent sends with every call.

    Any thread may use any method. `counts` and `refusal` are written by the server's thread alone.
    """

    def __init__(
        self,
        on_end: Callable[[Session], None] = lambda _: None,
        *,
        calls_open_max: int = CALLS_OPEN_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.key = f"mr-{secrets.token_urlsafe(24)}"
        self.counts = CallCounts()
        self.refusal = ""
        """The words of the newest refusal."""
        self._on_end, self._calls_open_max, self._clock = on_end, calls_open_max, clock
        self._changed = threading.Condition(threading.Lock())
        self._untaken: deque[PendingCall] = deque()
        self._open: list[PendingCall] = []
        self._kept: deque[tuple[float, PendingCall]] = deque()  # answered, each with when
        self._by_name: dict[bytes, list[PendingCall]] = {}  # the open and the kept, the oldest first
        self._woken = self._ended = False
        self._last: Reply | None = None

    def next_call(self, timeout_s: float) -> PendingCall | None:
        """Wait for the next call. None: `timeout_s` is over, `wake` was called, or no call will come."""
        with self._changed:
            self._changed.wait_for(self._is_news, timeout_s)
            if self._woken or not self._untaken:
                self._woken = False
                return None
            return self._untaken.popleft()

    def wake(self) -> None:
        """The running `next_call`, or else the next one, returns None at once. Calls stay where they are."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def conclude(self, last_reply: Reply) -> None:
        """Answer every open call and every later call with `last_reply`, as of `closing_reply`."""
        with self._changed:
            self._last = last_reply
            self._untaken.clear()
            left = list(self._open)
            self._changed.notify_all()
        for pending in left:
            self.settle(pending, last_reply)

    def end(self) -> None:
        """Refuse every open call and every later call. The key opens nothing any more."""
        with self._changed:
            if self._ended:
                return
            self._ended = True
            self._untaken.clear()
            left = list(self._open)
            self._changed.notify_all()
        self._on_end(self)
        for pending in left:
            self.settle(pending, ended())
        with self._changed:
            self._by_name.clear()
            self._kept.clear()

    def submit(self, call: Call, name: bytes, *, repeats: bool = False) -> PendingCall:
        """The call to watch: a new call, or the earlier call that the request repeats. It repeats an equal
        call if it says so (`repeats`), or if the reply to that call never reached the agent: what an agent
        sends again by itself has no header for it.

        Raises: RefusedCall: the session has ended, or has too many open calls.
        """
        with self._changed:
            if self._ended:
                raise ended()
            self._forget()
            earlier = self._earlier(name, repeats)
            if earlier is not None:
                self.counts.joined += earlier.outcome is None
                self.counts.replayed += earlier.outcome is not None
                return earlier
            pending = PendingCall(self, call, name)
            if self._last is not None:
                self.counts.calls, self.counts.closed = self.counts.calls + 1, self.counts.closed + 1
                pending.outcome = self._last
                return pending
            if len(self._open) >= self._calls_open_max:
                message = f"this episode has {len(self._open)} calls that wait for their replies; ask later"
                raise RefusedCall(message, 429, retry_after_s=CALLS_OPEN_S)
            self.counts.calls += 1
            self._open.append(pending)
            self._untaken.append(pending)
            self._by_name.setdefault(name, []).append(pending)
            self._changed.notify()
            return pending

    def count_refusal(self, refusal: RefusedCall) -> None:
        """A request is answered with an error. It may have been no call."""
        self.counts.refused += 1
        self.refusal = str(refusal)

    def watch(self, pending: PendingCall, settled: Callable[[], None]) -> bool:
        """Returns whether the call has an outcome already. If not, the outcome's thread calls `settled`."""
        with self._changed:
            pending.watchers.append(settled)
            pending.was_watched = True
            return pending.outcome is not None

    def leave(self, pending: PendingCall, settled: Callable[[], None], *, delivered: bool) -> None:
        """End a `watch`. An open call stays open: the agent may send the call again."""
        with self._changed:
            pending.watchers.remove(settled)
            pending.delivered |= delivered

    def settle(self, pending: PendingCall, outcome: Outcome) -> bool:
        """A reply is kept for retries. A refusal is not: its retry deserves another try."""
        with self._changed:
            if pending.outcome is not None:
                return False
            pending.outcome = outcome
            self._open.remove(pending)
            if isinstance(outcome, Reply):
                self._kept.append((self._clock(), pending))
                self._forget()
            else:
                self._drop(pending)
            watchers = list(pending.watchers)
        for settled in watchers:
            settled()
        return True

    def _is_news(self) -> bool:
        return bool(self._untaken or self._woken or self._ended or self._last is not None)

    def _earlier(self, name: bytes, repeats: bool) -> PendingCall | None:
        """Of equal calls, one that has lost its connection; or else, for what says that it is a retry, the
        newest."""
        calls = self._by_name.get(name, [])
        lost = (one for one in calls if one.is_lost)
        return next(lost, calls[-1] if calls and repeats else None)

    def _forget(self) -> None:
        limit_s = self._clock() - KEPT_S
        while self._kept and (len(self._kept) > REPLIES_KEPT_MAX or self._kept[0][0] < limit_s):
            self._drop(self._kept.popleft()[1])

    def _drop(self, pending: PendingCall) -> None:
        calls = self._by_name[pending.name]
        calls.remove(pending)
        if not calls:
            del self._by_name[pending.name]


def ended() -> RefusedCall:
    return RefusedCall("this episode has ended", 409)


ENDED_KEYS_MAX = 4096
"""So many keys of ended sessions are remembered, for a clear error."""


class OpenSessions:
    """Sessions by their keys. Looked up by digests of keys, so that time tells nothing about a key."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[bytes, Session] = {}
        self._ended: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def open(self) -> Session:
        session = Session(self._forget, clock=self._clock)
        with self._lock:
            self._open[_digest(session.key)] = session
        return session

    def find(self, *keys: str) -> Session:
        """The session of the first key that has one: agents send keys of their own too.

        Raises: RefusedCall: 409 for the key of an ended session, 401 for other keys.
        """
        digests = [_digest(key) for key in keys]
        with self._lock:
            self._expire()
            for digest in digests:
                if digest in self._open:
                    return self._open[digest]
            if any(digest in self._ended for digest in digests):
                raise ended()
        problem = "the key is of no episode" if keys else "the request has no key"
        raise RefusedCall(
            f"{problem}; send the episode's key as Authorization: Bearer KEY, or as x-api-key", 401
        )

    def _forget(self, session: Session) -> None:
        digest = _digest(session.key)
        with self._lock:
            if self._open.pop(digest, None) is not None:
                self._ended[digest] = self._clock()
                self._expire()

    def _expire(self) -> None:
        limit_s = self._clock() - KEPT_S
        while self._ended and (
            len(self._ended) > ENDED_KEYS_MAX or next(iter(self._ended.values())) < limit_s
        ):
            self._ended.popitem(last=False)


def _digest(key: str) -> bytes:
    return blake2b(key.encode(errors="replace"), digest_size=16).digest()
