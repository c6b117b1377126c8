"""The most likely tokens at each position of a completion, for people who look at it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

Row = tuple[list[int], list[float]]
"""Ids and log-probs of one position, the most likely first."""


@dataclass(slots=True)
class TopLogprobs:
    """The `num` most likely tokens of each position, sampled or not.

    tokens    int32, ids, in order of position
    logprobs  float32, of the distribution that was sampled from; -inf: the token could not come
    """

    num: int
    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))

    @staticmethod
    def none(num: int, num_positions: int) -> TopLogprobs:
        """Of positions at which nothing was sampled."""
        size = num * num_positions
        return TopLogprobs(num, array("i", bytes(4 * size)), array("f", [float("-inf")]) * size)

    def part(self, start: int, stop: int) -> TopLogprobs:
        """A copy of the positions from `start` to `stop`."""
        part = slice(start * self.num, stop * self.num)
        return TopLogprobs(self.num, self.tokens[part], self.logprobs[part])

    def append(self, row: Row) -> None:
        self.tokens.extend(row[0])
        self.logprobs.extend(row[1])

    def extend(self, other: TopLogprobs) -> None:
        self.tokens += other.tokens
        self.logprobs += other.logprobs

    def aligned(self, num_positions: int) -> bool:
        return len(self.tokens) == len(self.logprobs) == self.num * num_positions

    def rows(self) -> Iterator[list[tuple[int, float]]]:
        """(id, log-prob) of the tokens that could come, for one position after another."""
        pairs = list(zip(self.tokens, self.logprobs, strict=True))
        for start in range(0, len(pairs), self.num):
            yield [pair for pair in pairs[start : start + self.num] if pair[1] > float("-inf")]
