"""Trees of tokens packed into rows, so that a prefix that several sequences share is forwarded once; and the
shares of a batch: the rows, and the tokens of rows, that a rank trains on. Every rank packs the same
rows, so ranks need no exchange.

A tree is a prompt and its completions. Its sequences are laid out in lexicographic order. Each sequence adds
only the tokens that it does not share with the sequence before it. No earlier sequence shares more tokens,
so the layout is a radix tree. A token's log-prob is read from the hidden state of its predecessor, so the
tokens behind the last trained token are not forwarded. Pure numpy: knows no model.

Shape suffixes: T = tokens of a row, P = tokens of a segment's prefix, N = trained tokens of a row.
Tokens may come as lists or as arrays; they are laid out as arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.core.errors import DataError
from millrace.trainer.ranks.mesh import Ranks
from millrace.trainer.recorded import OWN, TokenMasks, num_equal

Tokens = Sequence[int] | NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Branch:
    """One completion. `first_index` is the index of its first token in the batch's flat arrays, which
    hold every completion token, trained or not. `routing_CW`: the experts of the token before each token;
    None: not recorded."""

    tokens: Tokens
    mask: NDArray[np.bool_]
    first_index: int
    routing_CW: NDArray[np.int32] | None = None

    @cached_property
    def num_forwarded(self) -> int:
        """Tokens that some trained token looks back at, without the prompt."""
        trained = np.flatnonzero(self.mask)
        return int(trained[-1]) if trained.size else 0


@dataclass(frozen=True, slots=True)
class Tree:
    """`whole`: all of it is in one row, even if it is over the budget."""

    prompt: Tokens
    branches: Sequence[Branch]
    whole: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class RowSegment:
    """Tokens [start, start + length) of a row. Their attention is causal, and each token sees all of the
    row's tokens `prefix_P`, which precede the segment in its sequence."""

    start: int
    length: int
    prefix_P: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Subtree:
    """Sequences of one tree in the same row. `shared[i]`: the tokens that sequence i begins with as
    sequence i - 1 does, prompt included."""

    prompt: Tokens
    branches: list[Branch]
    shared: list[int]

    @property
    def num_forwarded(self) -> int:
        lengths = (branch.num_forwarded + len(self.prompt) for branch in self.branches)
        return sum(lengths) - sum(self.shared)


@dataclass(frozen=True, slots=True)
class Row:
    """One micro-batch. Trained token k is `targets_N[k]`, predicted from row position `sources_N[k]`, and
    is token `flat_N[k]` of the batch. `masks_N`: the tokens that could be sampled; None: every token.
    `routing_TW`: the experts of each position; None: the trainer's router chooses."""

    tokens_T: NDArray[np.int64]
    positions_T: NDArray[np.int64]
    segments: tuple[RowSegment, ...]
    sources_N: NDArray[np.int64]
    targets_N: NDArray[np.int64]
    flat_N: NDArray[np.int64]
    masks_N: TokenMasks | None = None
    routing_TW: NDArray[np.int32] | None = None


def pack(trees: Sequence[Tree], token_budget: int, *, full: int | None = None) -> list[Row]:
    """Pack trees into rows of at most `token_budget` forwarded tokens. `full`: several trees have at most so
    many in a row.

    A tree over the budget is split over several rows, its prompt repeated in each. A single sequence
    over the budget gets a row of its own: it cannot be split. Branches without a trained token are omitted.

    Raises:
        DataError: a trained token without a token before it, or a mask of another length than its tokens.
    """
    subtrees = [subtree for tree in trees for subtree in _split(tree, token_budget)]
    # first fit decreasing; stable, so deterministic
    subtrees.sort(key=lambda each: -each.num_forwarded)
    bins: list[list[_Subtree]] = []
    room: list[int] = []
    for subtree in subtrees:
        size = subtree.num_forwarded
        slot = next((i for i, free in enumerate(room) if size <= free), None)
        if slot is None:
            bins.append([subtree])
            room.append((token_budget if full is None else full) - size)
        else:
            bins[slot].append(subtree)
            room[slot] -= size
    return [_lay_out(group) for group in bins]


def padded(row: Row, multiple: int) -> Row:
    """The row with padding tokens behind it, up to a multiple of tokens."""
    tokens = len(row.tokens_T)
    missing = -tokens % multiple
    if not missing:
        return row
    nothing_T = np.zeros(missing, np.int64)
    return replace(
        row,
        tokens_T=np.concatenate([row.tokens_T, nothing_T]),
        positions_T=np.concatenate([row.positions_T, np.arange(missing)]),
        segments=(*row.segments, RowSegment(tokens, missing, nothing_T[:0])),
        routing_TW=with_own(row.routing_TW, missing),
    )


def with_own(routing_TW: NDArray[np.int32] | None, behind: int) -> NDArray[np.int32] | None:
    """The experts, with tokens behind them for which the trainer's router chooses."""
    return (
        routing_TW if routing_TW is None else np.pad(routing_TW, ((0, behind), (0, 0)), constant_values=OWN)
    )


def _split(tree: Tree, token_budget: int) -> list[_Subtree]:
    if not len(tree.prompt) and any(branch.mask[:1].any() for branch in tree.branches):
        raise DataError("a prompt to train on has no token: the first completion token has no predecessor")
    subtrees: list[_Subtree] = []
    before: Tokens = ()
    room = 0
    for forwarded, branch in _in_order(tree):
        common = _num_common(before, forwarded)
        recorded = subtrees[-1].branches[-1].routing_CW if subtrees else None
        # Token i has the record of position i - 1, so `common` tokens share one record more.
        shared = max(len(tree.prompt) - 1 + num_equal(recorded, branch.routing_CW, common + 1), 0)
        if not subtrees or (len(tree.prompt) + len(forwarded) - shared > room and not tree.whole):
            subtrees.append(_Subtree(tree.prompt, [], []))
            room, shared = token_budget, 0
        subtrees[-1].branches.append(branch)
        subtrees[-1].shared.append(shared)
        room -= len(tree.prompt) + len(forwarded) - shared
        before = forwarded
    return subtrees


def _in_order(tree: Tree) -> list[tuple[Tokens, Branch]]:
    """Branches with a trained token, and their forwarded tokens, in lexicographic order."""
    branches = []
    for branch in tree.branches:
        if len(branch.mask) != len(branch.tokens):
            raise DataError(f"a mask has {len(branch.mask)} entries for {len(branch.tokens)} tokens")
        if branch.mask.any():
            branches.append((branch.tokens[: branch.num_forwarded], branch))
    return sorted(branches, key=lambda pair: (_sortable(pair[0]), pair[1].first_index))


def _sortable(tokens: Tokens) -> bytes:
    """Bytes in the order of the tokens: ids are not negative."""
    return np.asarray(tokens, dtype=">i4").tobytes()


def _num_common(a: Tokens, b: Tokens) -> int:
    """Length of the common prefix."""
    shortest = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:shortest]) != np.asarray(b[:shortest]))
    return int(differ[0]) if differ.size else shortest


def _lay_out(subtrees: Sequence[_Subtree]) -> Row:
    columns: list[tuple[NDArray[np.int64], ...]] = []  # of each sequence, in the order of `Row`'s
    num_tokens = 0
    segments: list[RowSegment] = []
    routing: list[NDArray[np.int32]] = []
    for subtree in subtrees:
        path_T = np.empty(0, np.int64)  # row positions of the sequence's tokens
        for branch, shared in zip(subtree.branches, subtree.shared, strict=True):
            completion = np.asarray(branch.tokens, dtype=np.int64)
            sequence = np.concatenate([subtree.prompt, completion[: branch.num_forwarded]]).astype(np.int64)
            start, num_tokens = num_tokens, num_tokens + len(sequence) - shared
            path_T = np.concatenate([path_T[:shared], np.arange(start, num_tokens)])
            if num_tokens > start:
                segments.append(RowSegment(start, num_tokens - start, path_T[:shared]))
            trained = np.flatnonzero(branch.mask)
            columns.append(
                (
                    sequence[shared:],
                    np.arange(shared, len(sequence)),
                    path_T[len(subtree.prompt) + trained - 1],
                    completion[trained],
                    branch.first_index + trained,
                )
            )
            if branch.routing_CW is not None:
                recorded = branch.routing_CW[: branch.num_forwarded + 1]
                # -1 without a prompt: nothing precedes the first token
                unknown = len(sequence) - len(recorded)
                before = np.full((max(unknown, 0), recorded.shape[1]), OWN, np.int32)
                routing.append(np.concatenate([before, recorded[max(-unknown, 0) :]])[shared:])
    tokens_T, positions_T, sources_N, targets_N, flat_N = map(np.concatenate, zip(*columns, strict=True))
    routing_TW = np.concatenate(routing) if routing else None
    return Row(tokens_T, positions_T, tuple(segments), sources_N, targets_N, flat_N, routing_TW=routing_TW)


# ---------------------------------------------------------------- shares of a batch


def rows_of_rank(rows: Sequence[Row], ranks: Ranks) -> list[Row]:
    """This rank's rows, as many as every other rank's. A rank with fewer rows also runs rows that train
    nothing, because every rank takes part in every exchange."""
    if ranks.world == 1:
        return list(rows)
    shares = balanced([len(row.tokens_T) for row in rows], ranks.shard)
    of_rank = [rows[index] for index in shares[ranks.shard_index]]
    of_rank += [_idle(rows[0])] * (max(map(len, shares)) - len(of_rank))
    return [share_of_row(row, ranks.sequence_index, ranks.sequence) for row in of_rank]


def balanced(sizes: Sequence[int], num_shares: int) -> list[list[int]]:
    """Indices of rows for each share. Rows of similar size run at the same time, because ranks wait for one
    another after each row. The longest of these rows goes to the share with the fewest tokens.

    Degenerate:
        Fewer rows than shares: the last shares are empty.
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    tokens = [0] * num_shares
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    for begin in range(0, len(order), num_shares):
        emptiest = sorted(range(num_shares), key=lambda share: tokens[share])
        for index, share in zip(order[begin : begin + num_shares], emptiest, strict=False):
            shares[share].append(index)
            tokens[share] += sizes[index]
    return shares


def share_of_row(row: Row, index: int, count: int) -> Row:
    """Tokens of `row` that rank `index` of `count` computes. Shares are equal: the last is padded. Sources
    are counted from the begin of the share; segments are those of the whole row, for attention."""
    if count == 1:
        return row
    length = -(-len(row.tokens_T) // count)
    padding = length * count - len(row.tokens_T)
    share = slice(index * length, (index + 1) * length)
    trained = np.flatnonzero((row.sources_N >= share.start) & (row.sources_N < share.stop))
    segments, routing_TW = row.segments, with_own(row.routing_TW, padding)
    if padding:
        segments += (RowSegment(len(row.tokens_T), padding, np.empty(0, np.int64)),)
    return Row(
        tokens_T=np.pad(row.tokens_T, (0, padding))[share],
        positions_T=np.pad(row.positions_T, (0, padding))[share],
        segments=segments,
        sources_N=row.sources_N[trained] - share.start,
        targets_N=row.targets_N[trained],
        flat_N=row.flat_N[trained],
        routing_TW=None if routing_TW is None else routing_TW[share],
    )


def _idle(row: Row) -> Row:
    """A row of one token, which trains nothing."""
    nothing = np.empty(0, np.int64)
    return replace(
        row,
        tokens_T=row.tokens_T[:1],
        positions_T=row.positions_T[:1],
        segments=(RowSegment(0, 1, nothing),),
        sources_N=nothing,
        targets_N=nothing,
        flat_N=nothing,
        routing_TW=None if row.routing_TW is None else row.routing_TW[:1],
    )
