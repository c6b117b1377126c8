"""The trees of a batch: each trajectory is one sequence, or several where it has forks behind its prompt.

Only tokens of a sequence's own are trained: those before its fork are trained in an earlier sequence. So a
token has one advantage, one weight and one place in the flat arrays, however many sequences see the token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.core.completion.forks import path
from millrace.core.types import TrainGroup, TrainSequence
from millrace.trainer.batch.packing import Branch, Tree
from millrace.trainer.recorded.recorded_routing import OWN, routing_of

Member = tuple[TrainSequence, NDArray[np.bool_], int, NDArray[np.int32] | None]
"""A trajectory, which of its tokens are trained, where these are in the flat arrays, and its experts."""


def trees_of(
    groups: Sequence[TrainGroup], masks: Sequence[NDArray[np.bool_]], *, whole: bool
) -> list[list[Tree]]:
    """The trees of each group: one, or one of each trajectory if one of these has several sequences. `masks`:
    which tokens of each trajectory are trained. `whole`: all sequences of a trajectory are in one row."""
    sequences = [sequence for group in groups for sequence in group.sequences]
    firsts = accumulate(map(len, masks), initial=0)
    members = zip(sequences, masks, firsts, routing_of(sequences), strict=False)
    trees = []
    for group in groups:
        own = list(islice(members, len(group.sequences)))
        forked = any(fork.start for sequence in group.sequences for fork in sequence.columns.forks)
        each = [[member] for member in own] if forked else [own]
        trees.append([_tree(np.asarray(group.prompt), together, whole and forked) for together in each])
    return trees


def _tree(prompt: NDArray[Any], members: Sequence[Member], whole: bool) -> Tree:
    kept = [fork.kept for sequence, *_ in members for fork in sequence.columns.forks if not fork.after]
    shared = min([len(prompt), *kept])
    branches = [branch for member in members for branch in _branches(prompt, shared, *member)]
    return Tree(prompt[:shared], branches, whole)


def _branches(
    prompt: NDArray[Any],
    shared: int,
    sequence: TrainSequence,
    mask: NDArray[np.bool_],
    first: int,
    routing_CW: NDArray[np.int32] | None,
) -> Iterator[Branch]:
    """The sequences of a trajectory, without the first `shared` tokens of the prompt."""
    columns = sequence.columns
    starts = sorted({0, *(fork.start for fork in columns.forks)})
    for start, stop in zip(starts, [*starts[1:], len(columns)], strict=True):
        kept, parts = path(columns.forks, stop)
        before = prompt[shared:kept]
        index = np.concatenate([np.arange(*part) for part in parts])  # of its tokens in the columns
        trained = np.concatenate([np.zeros(len(before), bool), mask[index] & (index >= start)])
        tokens = np.concatenate([before, np.asarray(columns.tokens)[index]])
        experts = routing_CW
        if experts is not None:
            experts = np.pad(experts[index], ((len(before), 0), (0, 0)), constant_values=OWN)
        yield Branch(tokens, trained, first + stop - len(tokens), experts)
