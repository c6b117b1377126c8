"""Simulated prompts, completions and rewards. Every length is a pure function of (seed, trajectory id)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

from millrace.core.errors import ConfigError
from millrace.core.types import Finish
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


@dataclass(frozen=True, slots=True)
class Workload:
    """Every draw is a pure function of its ids.

    `quantum` real tokens count as one unit. A simulated run keeps every unit of every trajectory, so units
    of, say, 64 tokens make long completions 64 times cheaper. Lengths in the fields are real tokens; the
    methods return units.
    """

    prompt_tokens: tuple[int, int] = (8, 64)  # range, uniform
    completion: Lengths = LogNormal(median=40.0, sigma=0.8)
    reward_mean: float = 0.5  # rewards are 0 or 1
    solved_fraction: float = 0.0  # of the rows: every completion has the reward 1
    hopeless_fraction: float = 0.0  # every completion has the reward 0
    failed_fraction: float = 0.0
    abstained_fraction: float = 0.0
    bad_prompt_fraction: float = 0.0
    unanswered_fraction: float = 0.0  # of the trajectories: their reward never answers
    starved_fraction: float = 0.0  # their reward needs more memory than its worker may have
    turns: tuple[int, int] = (1, 1)  # of an episode: range, uniform
    observation_tokens: int = 16
    forked_fraction: float = 0.0  # of the answers: they begin another sequence
    tool_s: Lengths = LogNormal(median=1.0, sigma=1.0)  # seconds of one answer of an environment
    start_s: Lengths | None = None  # seconds until an agent makes its first request; None: no agents
    own_share: float = 0.0  # of the prompt of an agent: what differs from other agents of its row
    quantum: int = 1
    difficulty: RowDifficulty | None = None  # None: each group has a row of its own

    def row_id(self, group_id: int) -> str:
        return f"row-{group_id if self.difficulty is None else self.difficulty.row(group_id)}"

    def prompt_length(self, seed: int, group_id: int) -> int:
        low, high = self.prompt_tokens
        length = low + int(uniform(seed, "prompt", group_id) * (high - low + 1))
        return max(1, round(length / self.quantum))

    def pass_rate(self, seed: int, group_id: int) -> float:
        """The share of right completions of a row."""
        if self.difficulty is not None:
            return self.difficulty.pass_rate(seed, group_id)
        u = uniform(seed, "difficulty", group_id)
        if u < self.solved_fraction + self.hopeless_fraction:
            return float(u < self.solved_fraction)
        return self.reward_mean

    def completion_length(
        self, seed: int, trajectory_id: int, max_units: int, turn_start: int = 0
    ) -> tuple[int, Finish]:
        """Units of a completion at the end of a turn that begins with unit `turn_start`, and how the turn
        ends. Both are the same wherever the completion is resumed."""
        of_turn = hash((seed, turn_start)) if turn_start else seed
        factor = 1.0 if self.difficulty is None else self.difficulty.length_factor(seed, trajectory_id)
        drawn = factor * self.completion.draw(of_turn, trajectory_id)
        length = turn_start + max(1, round(drawn / self.quantum))
        return (length, Finish.STOP) if length <= max_units else (max_units, Finish.LENGTH)

    def num_turns(self, seed: int, trajectory_id: int) -> int:
        low, high = self.turns
        return low + int(uniform(seed, "turns", trajectory_id) * (high - low + 1))


@dataclass(frozen=True, slots=True)
class RowDifficulty:
    """`rows` rows in the order of their numbers, epoch after epoch. The logit of a row's pass rate is normal
    with mean 0 and standard deviation `spread`, and rises by `gain` with each epoch. A row that is harder by
    one deviation has completions that are longer by the factor exp(`longer`)."""

    rows: int
    group_size: int
    spread: float = 4.0
    gain: float = 0.0
    longer: float = 0.0

    def row(self, group_id: int) -> int:
        return group_id % self.rows

    def pass_rate(self, seed: int, group_id: int) -> float:
        logit = self.gain * (group_id // self.rows) - self.spread * self._hardness(seed, group_id)
        return 1.0 / (1.0 + math.exp(-logit))

    def length_factor(self, seed: int, trajectory_id: int) -> float:
        return math.exp(self.longer * self._hardness(seed, trajectory_id // self.group_size))

    def _hardness(self, seed: int, group_id: int) -> float:
        return normal(seed, "difficulty", self.row(group_id))
