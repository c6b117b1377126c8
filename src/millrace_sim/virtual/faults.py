"""Faults of a simulated run, as data. The same data and seed give the same faults.

`workers` is a shell pattern over worker names: `replica-*`, `trainer`, `*`. Times are seconds of
virtual time. A fault is an action of the world on a worker, never the reaction of the worker.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Latency:
    """Delay of one message: a constant, an exponential part, and sometimes a spike."""

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
    """The incarnation that is alive at `at_s` dies."""

    workers: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Strike:
    """The incarnations that are alive `after_s` after `version` was first committed die.

    The name `controller` means the controller, and every worker with it. `trainer` means the one that trains,
    where another is its standby.
    """

    workers: str
    version: int
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Starts:
    """A start of the workers takes a time of this range, in place of `Faults.spawn_s`."""

    workers: str
    range_s: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Notice:
    """The incarnation that is alive at `at_s` learns that its host goes away, and dies `grace_s` later."""

    workers: str
    at_s: float
    grace_s: float = 25.0


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
class Stuck:
    """The incarnation alive at `at_s` makes no progress from then on and uses no CPU. It still answers
    heartbeats."""

    workers: str
    at_s: float


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
class Partitions:
    """Every incarnation is cut off once, after an exponential time with mean `mtbf_s`, for a time drawn
    from `lasts_s`. The incarnation keeps running; its messages, in both directions, arrive when the cut is
    over.

    A kill does not reach the incarnation either: its handle is dead at once, and the incarnation runs on to
    the end of the cut.
    """

    workers: str
    mtbf_s: float
    lasts_s: tuple[float, float] = (1.0, 10.0)


class Fate(Enum):
    """The fate of one call."""

    FINE = "fine"
    LOST = "lost"  # the request never arrives
    UNANSWERED = "unanswered"  # it is executed, its answer never arrives
    DOUBLED = "doubled"  # it arrives twice and is executed twice; the first execution answers
    OVERTAKEN = "overtaken"  # request and answer leave the queue, so the order of messages changes


@dataclass(frozen=True, slots=True)
class Mishaps:
    """Probabilities of faults of a call. A call has at most one fault. Streams are reliable.

    `overtaken_s` is the longest extra delay of a request or answer that left its queue.
    """

    workers: str
    lost: float = 0.0
    unanswered: float = 0.0
    doubled: float = 0.0
    overtaken: float = 0.0
    overtaken_s: float = 0.5

    def draw(self, rng: random.Random) -> Fate:
        left = rng.random()
        for fate, probability in (
            (Fate.LOST, self.lost),
            (Fate.UNANSWERED, self.unanswered),
            (Fate.DOUBLED, self.doubled),
            (Fate.OVERTAKEN, self.overtaken),
        ):
            left -= probability
            if left < 0:
                return fate
        return Fate.FINE


@dataclass(frozen=True, slots=True)
class ClockJump:
    """At `at_s` every clock jumps ahead by `by_s`, as after a host was suspended."""

    at_s: float
    by_s: float


@dataclass(frozen=True, slots=True)
class Corruption:
    """Probabilities that bytes change in a copy: in a slot (`written`), in a replica's copy (`read`)."""

    written: float = 0.0
    read: float = 0.0


@dataclass(frozen=True, slots=True)
class Faults:
    """All faults. By default there are none, and starts and deaths take a moment."""

    crashes: tuple[Crash, ...] = ()
    notices: tuple[Notice, ...] = ()
    failures: tuple[Failures, ...] = ()
    slow: tuple[Slow, ...] = ()
    stuck: tuple[Stuck, ...] = ()
    lags: tuple[Lag, ...] = ()
    partitions: tuple[Partitions, ...] = ()
    mishaps: tuple[Mishaps, ...] = ()
    corruption: Corruption = Corruption()
    poisonous: float = 0.0  # of the trajectories: a batch with one of them is rejected by the trainer
    clock_jumps: tuple[ClockJump, ...] = ()
    controller_crashes: tuple[float, ...] = ()  # when the controller dies, and every worker with it
    strikes: tuple[Strike, ...] = ()
    forgets: bool = False  # a controller that starts again has the ledger as it was at the last checkpoint
    spawn_s: tuple[float, float] = (0.02, 0.1)  # range of a worker's start
    starts: tuple[Starts, ...] = ()  # of some workers; the first that fits counts
    notice_s: float = 0.005  # from a death until the others know

    def times_of_death(self, name: str, began_s: float, rng: random.Random) -> list[float]:
        """When an incarnation that began at `began_s` would die; the earliest time counts."""
        named = [c.at_s for c in self.crashes if fnmatchcase(name, c.workers) and c.at_s > began_s]
        drawn = [
            began_s + rng.expovariate(1.0 / f.mtbf_s) for f in self.failures if fnmatchcase(name, f.workers)
        ]
        return named + drawn

    def start_s(self, name: str, rng: random.Random) -> float:
        """Draws the time of a start at full speed."""
        ranges = (one.range_s for one in self.starts if fnmatchcase(name, one.workers))
        return rng.uniform(*next(ranges, self.spawn_s))

    def times_of_notice(self, name: str, began_s: float) -> list[tuple[float, float]]:
        """When an incarnation that began at `began_s` gets notice, and when it dies."""
        return [
            (n.at_s, n.at_s + n.grace_s)
            for n in self.notices
            if fnmatchcase(name, n.workers) and n.at_s > began_s
        ]

    def stuck_s(self, name: str, began_s: float) -> float:
        """The time after which an incarnation that began at `began_s` makes no progress."""
        return min(
            (s.at_s for s in self.stuck if fnmatchcase(name, s.workers) and s.at_s > began_s),
            default=math.inf,
        )

    def cut(self, name: str, began_s: float, rng: random.Random) -> tuple[float, float]:
        """Start and end of the cut of an incarnation that began at `began_s`; an empty span if there is
        none."""
        for partitions in self.partitions:
            if fnmatchcase(name, partitions.workers):
                start_s = began_s + rng.expovariate(1.0 / partitions.mtbf_s)
                return start_s, start_s + rng.uniform(*partitions.lasts_s)
        return math.inf, math.inf

    def fate(self, name: str, rng: random.Random) -> Fate:
        """Draws the fate of a call to `name`."""
        for mishaps in self.mishaps:
            if fnmatchcase(name, mishaps.workers):
                return mishaps.draw(rng)
        return Fate.FINE

    def straggle_s(self, name: str, rng: random.Random) -> float:
        """Extra delay of a message to or from `name` that left its queue."""
        longest = next((m.overtaken_s for m in self.mishaps if fnmatchcase(name, m.workers)), 0.0)
        return rng.uniform(0.0, longest)

    def slowdown(self, name: str, time_s: float) -> float:
        """Factor on computing times at `time_s`; 1 is full speed."""
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
