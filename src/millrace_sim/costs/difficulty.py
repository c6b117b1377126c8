"""A data set of rows that differ in difficulty, and that a run meets again each epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from millrace_sim.virtual.seeded import normal


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
