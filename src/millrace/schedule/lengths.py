"""Lengths: what a prompt's earlier completions say of its next ones, and which prompt starts where.

Source: StreamRL, arXiv:2504.15930. There a trained ranker predicts which prompts are long. Here the mean
length of a row's own earlier completions does. A row without any counts as an average row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from millrace.schedule.view import View

NEWEST = 0.5
"""Weight of a row's newest group in its mean: lengths drift as a model learns."""
ROWS_MAX = 1 << 18
"""Rows that are remembered. An epoch of most tasks has fewer; prompts that never repeat have no end."""


class PastLengths:
    """The mean length of each row's completions, in tokens. Of more than `ROWS_MAX` rows those are forgotten
    that were learned longest ago. A resumed run begins without lengths: they decide where a group starts, and
    nothing that is trained."""

    def __init__(self) -> None:
        self._means: OrderedDict[str, float] = OrderedDict()

    def learn(self, row_id: str, lengths: Sequence[int]) -> None:
        """Take in the completions of a group, at least one."""
        mean = fmean(lengths)
        self._means[row_id] = (1 - NEWEST) * self._means.get(row_id, mean) + NEWEST * mean
        self._means.move_to_end(row_id)
        if len(self._means) > ROWS_MAX:
            self._means.popitem(last=False)

    def predicted(self, row_id: str) -> float | None:
        """Tokens of a completion; None: the row has none yet."""
        return self._means.get(row_id)


class Pair(Protocol):
    """The choice of a prompt for each group that is admitted."""

    def pairs(
        self, view: View, pairs: list[tuple[int, str]], lengths: Sequence[float | None]
    ) -> list[tuple[int, str]]:
        """`pairs` of a prompt's index and a replica, rearranged: each index once, on one of the replicas."""

    def describe(self) -> str:
        """One line for people."""


@dataclass(frozen=True, slots=True)
class LongestFirst:
    """Long prompts start first, and together, on replicas that start fewer groups.

    Of replicas of one version, the emptiest gets the longest prompts, until it has its share of the predicted
    tokens; the next replica gets the next ones. So a long completion decodes in a small batch, which is
    fast, and no replica of short ones waits for it. Each replica that was admitted gets at least one group
    while prompts are left. A group changes its replica within one version, so its deadline stays.
    """

    def pairs(
        self, view: View, pairs: list[tuple[int, str]], lengths: Sequence[float | None]
    ) -> list[tuple[int, str]]:
        known = [length for length in lengths if length is not None]
        usual = fmean(known) if known else 1.0
        tokens = [usual if length is None else length for length in lengths]
        replicas = {replica.replica_id: replica for replica in view.replicas}
        arranged: list[tuple[int, str]] = []
        for version in {replicas[name].version: None for _, name in pairs}:
            same = [(index, name) for index, name in pairs if replicas[name].version == version]
            names = sorted(dict.fromkeys(name for _, name in same), key=lambda name: replicas[name].load)
            arranged += _shares(sorted((index for index, _ in same), key=lambda i: -tokens[i]), names, tokens)
        return arranged

    def describe(self) -> str:
        return "prompts whose earlier completions were long start first, and apart"


def _shares(indices: list[int], names: list[str], tokens: Sequence[float]) -> list[tuple[int, str]]:
    """Runs of `indices` with about equal sums of `tokens`, one for each of `names`."""
    pairs, left = list[tuple[int, str]](), sum(tokens[i] for i in indices)
    indices = indices[::-1]
    for position, name in enumerate(names):
        others = len(names) - position - 1
        share, spent = left / (others + 1), 0.0
        while len(indices) > others and (not spent or not others or spent + tokens[indices[-1]] / 2 <= share):
            index = indices.pop()
            pairs.append((index, name))
            spent += tokens[index]
        left -= spent
    return pairs
