"""Token ids of an episode without log-probs: an observed token is written as -1 - id."""

from __future__ import annotations

from array import array
from itertools import repeat
from math import nan

from millrace.core.completion.columns import OBSERVED, TokenColumns, token_array


def marked(columns: TokenColumns) -> array[int]:
    if (sampled := columns.sampled()) is None:
        return columns.tokens[:]
    return token_array(one if own else -1 - one for one, own in zip(columns.tokens, sampled, strict=True))


def unmarked(tokens: array[int], version: int) -> TokenColumns:
    """The inverse of `marked`, without log-probs. `version` sampled the tokens."""
    ids = [one if one >= 0 else -1 - one for one in tokens]
    return TokenColumns.of(ids, repeat(nan, len(ids)), [version if one >= 0 else OBSERVED for one in tokens])
