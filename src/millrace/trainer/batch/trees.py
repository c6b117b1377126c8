"""The trees of a batch: each trajectory is one sequence, or several where it has forks.

Only tokens of a sequence's own are trained: those before its fork are trained in an earlier sequence. So a
token has one advantage, one weight and one place in the flat arrays, however many sequences see the token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.core.completion.columns import TokenColumns
from millrace.core.completion.forks import path
from millrace.core.types import TrainGroup
from millrace.trainer.batch.packing import Branch, Tree
from millrace.trainer.recorded.routing import OWN, routing_of


def trees_of(
    groups: Sequence[TrainGroup], masks: Sequence[NDArray[np.bool_]], *, whole: bool
) -> list[list[Tree]]:
    """The trees of each group. `masks`: which tokens of each trajectory are trained. `whole`: all sequences
    of a trajectory with forks are in one row."""
    routing = routing_of([sequence for group in groups for sequence in group.sequences])
    trees, at, first = list[list[Tree]](), 0, 0
    for group in groups:
        prompt, plain, forked = np.asarray(group.prompt), list[Branch](), list[Tree]()
        for sequence in group.sequences:
            columns = sequence.columns
            one = Branch(np.asarray(columns.tokens), masks[at], first, routing[at])
            if columns.forks:
                forked.append(_tree(prompt, columns, one, whole))
            else:
                plain.append(one)
            at, first = at + 1, first + len(columns)
        trees.append([*([Tree(prompt, plain)] if plain else []), *forked])
    return trees


def _tree(prompt: NDArray[Any], columns: TokenColumns, one: Branch, whole: bool) -> Tree:
    """`one`: the columns as a single branch."""
    shared = min([len(prompt), *(fork.kept for fork in columns.forks if not fork.after)])
    return Tree(prompt[:shared], list(_branches(prompt, shared, columns, one)), whole)


def _branches(prompt: NDArray[Any], shared: int, columns: TokenColumns, one: Branch) -> Iterator[Branch]:
    """The sequences of a trajectory, without the first `shared` tokens of the prompt."""
    starts = [0, *(fork.start for fork in columns.forks)]
    for start, stop in zip(starts, [*starts[1:], len(columns)], strict=True):
        kept, parts = path(columns.forks, stop)
        before = prompt[shared:kept]
        index = np.concatenate([np.arange(*part) for part in parts])  # of its tokens in the columns
        trained = np.concatenate([np.zeros(len(before), bool), one.mask[index] & (index >= start)])
        tokens = np.concatenate([before, np.asarray(one.tokens)[index]])
        routing = one.routing_CW
        if routing is not None:
            routing = np.pad(routing[index], ((len(before), 0), (0, 0)), constant_values=OWN)
        yield Branch(tokens, trained, one.first_index + stop - len(tokens), routing)
