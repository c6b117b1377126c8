"""The shares of a batch: the rows, and the tokens of rows, that a rank trains on. Every rank packs the same
rows, so ranks need no exchange. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from millrace.trainer.batch.packing import Row, RowSegment, with_own
from millrace.trainer.ranks.mesh import Ranks


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
