"""How long a command may take, learned from those before it.

A worker whose process answers heartbeats can still be stuck in one call. The first call of a kind may
take the whole limit; after that a call is given up when it takes many times longer than any before it.
One that was given up wrongly has the whole limit again, so a misjudged call costs one restart.
"""

from __future__ import annotations

from typing import Any

from millrace.core import clock
from millrace.core.errors import DeadlineExceeded
from millrace.core.protocols import Handle

FACTOR = 10.0
FLOOR_S = 20.0  # no call is given up sooner: a loaded machine is slow now and then


class Patience:
    """Of one run, for the calls of all its workers. `limit_s` bounds every call."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._longest_s: dict[str, float] = {}

    def deadline_s(self, method: str) -> float:
        longest_s = self._longest_s.get(method)
        if longest_s is None:
            return self._limit_s
        return min(self._limit_s, max(FLOOR_S, FACTOR * longest_s))

    async def call(self, handle: Handle, method: str, *args: Any) -> Any:
        """`handle.call` with the deadline of `method`. Raises: as that does."""
        started_s = clock.now()
        try:
            answer = await handle.call(method, *args, timeout_s=self.deadline_s(method))
        except DeadlineExceeded:
            self._longest_s.pop(method, None)
            raise
        self._longest_s[method] = max(self._longest_s.get(method, 0.0), clock.now() - started_s)
        return answer
