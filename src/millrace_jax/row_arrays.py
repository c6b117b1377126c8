"""Packed rows as arrays of few shapes, so that few programs are compiled.

Shape suffixes: R rows, T tokens of a row, N trained tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.trainer.batch.packing import Row, Tree, pack

TOKENS_MIN, TRAINED_MIN = 128, 256
"""Tokens of a row are multiples of the first. Trained tokens of shorter rows are multiples of the second."""
BANDS = (64, 128, 256, 512, 1024, 2048)


NOTHING = Row(*(np.empty(0, np.int64),) * 2, (), *(np.empty(0, np.int64),) * 3)
"""A row without a token, which pads a set of rows."""


@dataclass(frozen=True, eq=False)
class RowArrays:
    """R rows. Padding tokens see themselves alone; padding among the trained tokens has flat_RN -1.

    `band`: no token sees another that is more than 2 x `band` before it. It divides T, and is one of BANDS.
    0: a token may see all of its row."""

    tokens_RT: NDArray[np.int32]
    positions_RT: NDArray[np.int32]
    ends_RT: NDArray[np.int32]
    sources_RN: NDArray[np.int32]
    targets_RN: NDArray[np.int32]
    flat_RN: NDArray[np.int64]
    band: int


def bucket(count: int) -> int:
    """The next power of two, TOKENS_MIN at least."""
    return max(TOKENS_MIN, 1 << (count - 1).bit_length())


def padded_tokens(count: int) -> int:
    """The next of few numbers: eight between two powers of two, all of them multiples of TOKENS_MIN."""
    return _multiple(count, max(TOKENS_MIN, bucket(count) // 16))


def even_rows(trees: Sequence[Tree], token_budget: int, at_once: int) -> list[Row]:
    """Rows of `pack` for devices that compute `at_once` rows: where the budget leaves some of them without a
    row, the rows are shorter and as many more."""
    rows = pack(trees, token_budget)
    wanted = -(-len(rows) // at_once) * at_once
    tokens = math.ceil(sum(len(row.tokens_T) for row in rows) / max(1, wanted))
    while len(rows) < wanted and tokens < token_budget:
        tokens = math.ceil(1.1 * tokens)
        shorter = pack(trees, min(tokens, token_budget))
        if len(shorter) <= wanted:
            return shorter
    return rows


def arrays_of(rows: Sequence[Row]) -> RowArrays:
    """`rows` padded to one shape. Few shapes are few programs."""
    tokens, view = max(len(row.tokens_T) for row in rows), max(map(_longest_view, rows))
    band = next((band for band in BANDS if view <= 2 * band and 4 * band <= tokens), 0)
    tokens = _multiple(padded_tokens(tokens), max(band, TOKENS_MIN))
    trained = _share(max(len(row.targets_N) for row in rows), tokens)
    ends_RT = _stacked([ends(row) for row in rows], tokens)
    for row, ends_T in zip(rows, ends_RT, strict=True):
        ends_T[len(row.tokens_T) :] = np.arange(len(row.tokens_T), tokens) + 1
    return RowArrays(
        tokens_RT=_stacked([row.tokens_T for row in rows], tokens),
        positions_RT=_stacked([row.positions_T for row in rows], tokens),
        ends_RT=ends_RT,
        sources_RN=_stacked([row.sources_N for row in rows], trained),
        targets_RN=_stacked([row.targets_N for row in rows], trained),
        flat_RN=_stacked([row.flat_N for row in rows], trained, -1, np.int64),
        band=band,
    )


def _multiple(count: int, of: int) -> int:
    """The next multiple, and at least one."""
    return max(1, -(-count // of)) * of


def _share(count: int, tokens: int) -> int:
    """The next quarter of `tokens`, or more than them."""
    quarters = (min(tokens, _multiple(tokens * quarter // 4, TRAINED_MIN)) for quarter in (1, 2, 3, 4))
    return next((quarter for quarter in quarters if count <= quarter), padded_tokens(count))


def _longest_view(row: Row) -> int:
    """The most tokens between a token and the first that it sees."""
    first = (segment.prefix_P[0] if len(segment.prefix_P) else segment.start for segment in row.segments)
    ends = (segment.start + segment.length - 1 for segment in row.segments)
    return max((int(end - begin) for begin, end in zip(first, ends, strict=True)), default=0)


def ends(row: Row) -> NDArray[np.int64]:
    """For each token the first position behind all tokens that see it. (T,)

    A segment begins behind `prefix_P`. What lies between the last token of the prefix and the segment does
    not see the segment's tokens, and is not seen by them: it ends there."""
    ends_T = np.full(len(row.tokens_T), len(row.tokens_T), np.int64)
    path_P = np.empty(0, np.int64)  # the tokens that the segment before sees, and its own
    for segment in row.segments:
        kept = len(segment.prefix_P)
        ends_T[path_P[kept:]] = segment.start
        own = np.arange(segment.start, segment.start + segment.length)
        path_P = np.concatenate([segment.prefix_P, own])
    return ends_T


def _stacked(
    arrays: Sequence[NDArray[Any]], length: int, fill: int = 0, dtype: Any = np.int32
) -> NDArray[Any]:
    stacked = np.full((len(arrays), length), fill, dtype)
    for into, array in zip(stacked, arrays, strict=True):
        into[: len(array)] = array
    return stacked
