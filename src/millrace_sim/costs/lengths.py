"""Lengths of completions. Every draw is a pure function of (seed, trajectory id)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

from millrace.core.errors import ConfigError
from millrace_sim.virtual.seeded import normal, uniform

Z_99 = NormalDist().inv_cdf(0.99)
"""The 99th percentile of a standard normal."""


class Lengths(Protocol):
    """A distribution of completion lengths, in tokens, before any budget cuts them."""

    def draw(self, seed: int, trajectory_id: int) -> float: ...


@dataclass(frozen=True, slots=True)
class LogNormal:
    """`shared` of the variance is common to the `group_size` completions of a prompt: some problems need long
    answers. `sigma` is of the logarithm. Reasoning traces are nearly log-normal: p99 = 10 x median gives 0.99
    (Laminar, arXiv:2510.12633, figure 2)."""

    median: float
    sigma: float
    shared: float = 0.0
    group_size: int = 1

    @classmethod
    def from_percentiles(cls, median: float, p99: float) -> LogNormal:
        return cls(median, math.log(p99 / median) / Z_99)

    def draw(self, seed: int, trajectory_id: int) -> float:
        z = normal(seed, "completion", trajectory_id)
        if self.shared:
            common = normal(seed, "row", trajectory_id // self.group_size)
            z = math.sqrt(self.shared) * common + math.sqrt(1.0 - self.shared) * z
        return self.median * math.exp(self.sigma * z)


@dataclass(frozen=True, slots=True)
class Empirical:
    """Observed lengths, for example of a real run's ledger, drawn with replacement and interpolated between
    neighbours. `values` ascend."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, observed: Sequence[float]) -> Empirical:
        """Raises: ConfigError: nothing was observed."""
        if not observed:
            raise ConfigError("no completion to take lengths from: the run has none yet")
        return cls(tuple(sorted(float(value) for value in observed)))

    def draw(self, seed: int, trajectory_id: int) -> float:
        place = uniform(seed, "completion", trajectory_id) * (len(self.values) - 1)
        low = int(place)
        high = min(low + 1, len(self.values) - 1)
        return self.values[low] + (place - low) * (self.values[high] - self.values[low])


@dataclass(frozen=True, slots=True)
class Mixture:
    """Several kinds of task; weights need not sum to 1."""

    components: tuple[tuple[float, Lengths], ...]

    def draw(self, seed: int, trajectory_id: int) -> float:
        place = uniform(seed, "mixture", trajectory_id) * sum(weight for weight, _ in self.components)
        for weight, component in self.components:
            place -= weight
            if place < 0:
                return component.draw(seed, trajectory_id)
        return self.components[-1][1].draw(seed, trajectory_id)


@dataclass(frozen=True, slots=True)
class Drift:
    """Completions that grow during training, by `factor` over the first `trajectories`. Trajectory ids follow
    the data stream, so they measure training time."""

    inner: Lengths
    factor: float
    trajectories: int

    def draw(self, seed: int, trajectory_id: int) -> float:
        share = min(1.0, trajectory_id / self.trajectories)
        return self.inner.draw(seed, trajectory_id) * (1.0 + (self.factor - 1.0) * share)


@dataclass(frozen=True, slots=True)
class Turns:
    """A multi-turn trajectory: a geometric number of turns (`mean_turns`, at most `turns_max`), each drawn
    from `turn` and followed by `reply_tokens` of the environment's. The replies count as generated: they are
    in the KV cache and in the trainer, and a simulated engine has no cheaper way to add them."""

    turn: Lengths
    mean_turns: float
    turns_max: int = 64
    reply_tokens: float = 0.0

    def draw(self, seed: int, trajectory_id: int) -> float:
        ends = 1.0 / max(1.0, self.mean_turns)
        u = uniform(seed, "turns", trajectory_id)
        turns = 1 if ends >= 1.0 else 1 + int(math.log(u) / math.log(1.0 - ends))
        turns = min(turns, self.turns_max)
        first = trajectory_id * self.turns_max
        tokens = sum(self.turn.draw(seed, first + index) for index in range(turns))
        return tokens + (turns - 1) * self.reply_tokens
