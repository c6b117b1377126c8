"""Simulated prompts, completions and rewards."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.core.types import Finish
from millrace.sim.costs.lengths import Lengths, LogNormal
from millrace.sim.virtual.seeded import uniform


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
    failed_fraction: float = 0.0
    abstained_fraction: float = 0.0
    bad_prompt_fraction: float = 0.0
    unanswered_fraction: float = 0.0  # of the trajectories: their reward never answers
    starved_fraction: float = 0.0  # their reward needs more memory than its worker may have
    quantum: int = 1

    def prompt_length(self, seed: int, group_id: int) -> int:
        low, high = self.prompt_tokens
        length = low + int(uniform(seed, "prompt", group_id) * (high - low + 1))
        return max(1, round(length / self.quantum))

    def completion_length(self, seed: int, trajectory_id: int, max_units: int) -> tuple[int, Finish]:
        """Units of a whole completion, and its end. Both are the same wherever the completion is resumed."""
        length = max(1, round(self.completion.draw(seed, trajectory_id) / self.quantum))
        return (length, Finish.STOP) if length <= max_units else (max_units, Finish.LENGTH)
