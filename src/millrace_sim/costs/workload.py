"""Simulated prompts, completions and rewards."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.core.types import Finish
from millrace_sim.costs.difficulty import RowDifficulty
from millrace_sim.costs.lengths import Lengths, LogNormal
from millrace_sim.virtual.seeded import uniform


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
