"""The pauses before an attempt is repeated. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

PAUSE_S_MAX = 60.0


def pauses_s(key: str, attempts: int, backoff_s: float) -> Iterator[float]:
    """The pauses between `attempts`, in seconds. They double up to `PAUSE_S_MAX`, with jitter of half their
    size, which depends on `key` alone."""
    jitter = Random(key.encode(errors="replace"))
    for doubled in range(attempts - 1):
        yield min(backoff_s * 2**doubled * jitter.uniform(0.5, 1.5), PAUSE_S_MAX)
