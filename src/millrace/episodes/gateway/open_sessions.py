"""The sessions of every agent that may ask, by their keys."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

from millrace.episodes.gateway.calls import RefusedCall
from millrace.episodes.gateway.sessions import KEPT_S, Session, ended

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
