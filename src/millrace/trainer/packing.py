"""Trees of tokens packed into rows: a prompt that several sequences share is forwarded once.

A tree is a prompt and its completions. In a row it lies as prompt, completion 1, ..., completion n, with
the positions of every completion going on from the prompt. A token's log-prob is read from the hidden
state of its predecessor, so what follows the last trained token is not forwarded at all. Pure numpy:
knows no model.

Shape suffixes: T = tokens of a row, N = trained tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.core.errors import DataError


@dataclass(frozen=True, slots=True)
class Branch:
    """One completion. `first_index` is the index of its first token in the batch's flat arrays, which
    hold every completion token, trained or not."""

    tokens: Sequence[int]
    mask: NDArray[np.bool_]
    first_index: int

    @property
    def num_forwarded(self) -> int:
        """Tokens that some trained token looks back at, beside the prompt."""
        trained = np.flatnonzero(self.mask)
        return int(trained[-1]) if trained.size else 0


@dataclass(frozen=True, slots=True)
class Tree:
    prompt: Sequence[int]
    branches: Sequence[Branch]

    @property
    def num_forwarded(self) -> int:
        return len(self.prompt) + sum(branch.num_forwarded for branch in self.branches)


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens [start, start + length) of a row: causal among themselves, and each sees all of
    [prefix_start, prefix_start + prefix_length)."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One micro-batch. Trained token k is `targets_N[k]`, predicted from row position `sources_N[k]`, and
    is token `flat_N[k]` of the batch."""

    tokens_T: NDArray[np.int64]
    positions_T: NDArray[np.int64]
    runs: tuple[Run, ...]
    sources_N: NDArray[np.int64]
    targets_N: NDArray[np.int64]
    flat_N: NDArray[np.int64]


def pack(trees: Sequence[Tree], token_budget: int) -> list[Row]:
    """Pack trees into rows of at most `token_budget` forwarded tokens.

    A tree over the budget is split over several rows, its prompt repeated in each. A single sequence
    over the budget gets a row of its own: it cannot be split, and refusing it would lose it. Branches
    without a trained token are left out.

    Raises:
        DataError: a tree without a prompt token, or a mask of another length than its tokens.
    """
    pieces = [piece for tree in trees for piece in _split(tree, token_budget)]
    pieces.sort(key=lambda piece: -piece.num_forwarded)  # first fit decreasing; stable, so deterministic
    bins: list[list[Tree]] = []
    room: list[int] = []
    for piece in pieces:
        size = piece.num_forwarded
        slot = next((i for i, left in enumerate(room) if size <= left), None)
        if slot is None:
            bins.append([piece])
            room.append(token_budget - size)
        else:
            bins[slot].append(piece)
            room[slot] -= size
    return [_lay_out(group) for group in bins]


def _split(tree: Tree, token_budget: int) -> list[Tree]:
    if not tree.prompt:
        raise DataError("a prompt to train on has no token: the first completion token has no predecessor")
    pieces: list[list[Branch]] = []
    room = 0
    for branch in tree.branches:
        if len(branch.mask) != len(branch.tokens):
            raise DataError(f"a mask has {len(branch.mask)} entries for {len(branch.tokens)} tokens")
        if not branch.mask.any():
            continue
        size = branch.num_forwarded
        if not pieces or size > room:
            pieces.append([])
            room = token_budget - len(tree.prompt)
        pieces[-1].append(branch)
        room -= size
    return [Tree(tree.prompt, branches) for branches in pieces]


def _lay_out(trees: Sequence[Tree]) -> Row:
    tokens: list[int] = []
    positions: list[NDArray[np.int64]] = []
    runs: list[Run] = []
    sources: list[NDArray[np.int64]] = []
    targets: list[NDArray[np.int64]] = []
    flat: list[NDArray[np.int64]] = []
    for tree in trees:
        root, prompt_length = len(tokens), len(tree.prompt)
        tokens.extend(tree.prompt)
        positions.append(np.arange(prompt_length))
        for branch in tree.branches:
            start, length = len(tokens), branch.num_forwarded
            tokens.extend(branch.tokens[:length])
            positions.append(np.arange(prompt_length, prompt_length + length))
            if length and len(tree.branches) > 1:
                runs.append(Run(start, length, root, prompt_length))
            trained = np.flatnonzero(branch.mask)
            sources.append(np.where(trained == 0, root + prompt_length - 1, start + trained - 1))
            targets.append(np.asarray(branch.tokens, dtype=np.int64)[trained])
            flat.append(branch.first_index + trained)
        # An only child is one plain causal run with its prompt.
        runs.append(Run(root, len(tokens) - root if len(tree.branches) == 1 else prompt_length))
    return Row(
        tokens_T=np.asarray(tokens, dtype=np.int64),
        positions_T=np.concatenate(positions),
        runs=tuple(runs),
        sources_N=np.concatenate(sources),
        targets_N=np.concatenate(targets),
        flat_N=np.concatenate(flat),
    )
