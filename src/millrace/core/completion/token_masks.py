"""The tokens that could have come at each position of a completion, if sampling cuts other tokens off."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True)
class AllowedTokens:
    """The allowed tokens of each position, in order of position. The sampled token is one of them.

    counts  int32, how many could come; 0: the complete vocabulary, or no token was sampled there
    tokens  int32, the ids of all positions
    """

    counts: array[int] = field(default_factory=lambda: array("i"))
    tokens: array[int] = field(default_factory=lambda: array("i"))

    @staticmethod
    def unlimited(num_positions: int) -> AllowedTokens:
        return AllowedTokens(array("i", bytes(4 * num_positions)))

    def part(self, start: int, stop: int) -> AllowedTokens:
        """A copy of the positions from `start` to `stop`."""
        begin = sum(self.counts[:start])
        counts = self.counts[start:stop]
        return AllowedTokens(counts, self.tokens[begin : begin + sum(counts)])

    def append(self, row: bytes) -> None:
        """`row`: int32 ids."""
        self.counts.append(len(row) // 4)
        self.tokens.frombytes(row)

    def extend(self, other: AllowedTokens) -> None:
        self.counts += other.counts
        self.tokens += other.tokens

    def aligned(self, num_positions: int) -> bool:
        return len(self.counts) == num_positions and sum(self.counts) == len(self.tokens)
