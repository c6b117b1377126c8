"""What goes wrong in a simulated run, as data. The same data and seed give the same faults.

`workers` is a shell pattern over worker names: `replica-*`, `trainer`, `*`. Times are seconds of
virtual time. A fault names what the world does to a worker, never what the worker does about it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Latency:
    """Delay of one message: a floor, an exponential tail, and now and then a spike."""

    base_s: float = 0.0005
    jitter_s: float = 0.0005  # mean of the exponential part
    spike_probability: float = 0.0
    spike_s: float = 0.0

    def draw(self, rng: random.Random) -> float:
        delay = self.base_s
        if self.jitter_s:
            delay += rng.expovariate(1.0 / self.jitter_s)
        if self.spike_probability and rng.random() < self.spike_probability:
            delay += self.spike_s
        return delay


@dataclass(frozen=True, slots=True)
class Crash:
    """Whichever incarnation is alive at `at_s` dies."""

    workers: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Failures:
    """Every incarnation dies after an exponential time with mean `mtbf_s`."""

    workers: str
    mtbf_s: float


@dataclass(frozen=True, slots=True)
class Slow:
    """Computing takes `factor` times as long between `start_s` and `end_s`."""

    workers: str
    factor: float
    start_s: float = 0.0
    end_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Lag:
    """Messages sent to or by the worker between `start_s` and `end_s` take `extra_s` longer.

    With a large `extra_s` the worker is cut off while it keeps running.
    """

    workers: str
    extra_s: float
    start_s: float = 0.0
    end_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Faults:
    """All that goes wrong. The default is a calm world in which starting and dying take a moment."""

    crashes: tuple[Crash, ...] = ()
    failures: tuple[Failures, ...] = ()
    slow: tuple[Slow, ...] = ()
    lags: tuple[Lag, ...] = ()
    spawn_s: tuple[float, float] = (0.02, 0.1)  # range of a worker's start
    notice_s: float = 0.005  # from a death until the others know

    def times_of_death(self, name: str, born_s: float, rng: random.Random) -> list[float]:
        """When an incarnation born at `born_s` would die; the first one counts."""
        named = [c.at_s for c in self.crashes if fnmatchcase(name, c.workers) and c.at_s > born_s]
        drawn = [
            born_s + rng.expovariate(1.0 / f.mtbf_s) for f in self.failures if fnmatchcase(name, f.workers)
        ]
        return named + drawn

    def slowdown(self, name: str, time_s: float) -> float:
        """By how much computing is slower at `time_s`; 1 is full speed."""
        factors = (
            s.factor for s in self.slow if s.start_s <= time_s < s.end_s and fnmatchcase(name, s.workers)
        )
        return math.prod(factors)

    def lag(self, name: str, time_s: float) -> float:
        """Extra delay of a message sent at `time_s`."""
        return sum(
            lag.extra_s
            for lag in self.lags
            if lag.start_s <= time_s < lag.end_s and fnmatchcase(name, lag.workers)
        )


pace: ContextVar[Callable[[], float]] = ContextVar("pace", default=lambda: 1.0)
"""Slowdown of the worker that the running code belongs to: simulated roles multiply costs by it."""
