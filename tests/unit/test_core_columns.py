"""Packed columns are what lists of tokens, log-probs and versions would be."""

from __future__ import annotations

import copy
import math
import pickle
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.completion.columns import TokenColumns, pack, unpack
from millrace.core.types import Finish, Progress, ReplicaLoad, Report

TOKEN = st.tuples(st.integers(0, 2**31 - 1), st.floats(width=32), st.integers(0, 4))
TOKENS = st.lists(TOKEN, max_size=30)


def columns_of(tokens) -> TokenColumns:
    return TokenColumns.of([t for t, _, _ in tokens], [p for _, p, _ in tokens], [v for _, _, v in tokens])


def listed(columns: TokenColumns) -> list[tuple[int, bytes, int]]:
    bits = [struct.pack("f", logprob) for logprob in columns.logprobs]
    return list(zip(columns.tokens, bits, columns.versions(), strict=True))


@given(TOKENS, TOKENS)
def test_they_grow_as_lists_do(first, second):
    appended, extended = columns_of(first), columns_of(first)
    for token in second:
        appended.append(*token)
    extended.extend(columns_of(second))
    assert appended == extended == columns_of(first + second)
    assert listed(appended) == [(t, struct.pack("f", p), v) for t, p, v in first + second]
    assert all(one[0] != other[0] for one, other in zip(appended.runs, appended.runs[1:], strict=False))


@given(TOKENS, st.integers(-40, 40), st.integers(-40, 40))
def test_a_part_is_what_the_part_of_a_list_is_and_a_copy(tokens, start, stop):
    columns = columns_of(tokens)
    part = columns[start:stop]
    assert part == columns_of(tokens[start:stop])
    part.append(1, 0.0, 9)
    assert columns == columns_of(tokens)


@given(TOKENS, st.integers(2, 5))
def test_they_survive_pickling_and_copying(tokens, protocol):
    columns = columns_of(tokens)
    assert pickle.loads(pickle.dumps(columns, protocol)) == columns
    assert copy.deepcopy(columns) == columns


@given(st.lists(TOKENS, max_size=5))
def test_many_are_packed_into_three_and_come_back(many):
    columns = [columns_of(tokens) for tokens in many]
    assert unpack(pack(columns)) == columns


@given(st.lists(TOKENS, max_size=5))
def test_a_report_comes_back_as_it_was(many):
    progress = [
        Progress(i, i + 1, 2 * i, columns_of(tokens), Finish.STOP if i % 2 else None)
        for i, tokens in enumerate(many)
    ]
    report = Report(progress, ReplicaLoad(3, running=2))
    assert pickle.loads(pickle.dumps(report, 5)) == report


def test_nan_equals_itself_and_a_signed_zero_is_another_zero():
    nan = TokenColumns.of([1], [math.nan], 0)
    assert nan == TokenColumns.of([1], [math.nan], 0)
    assert TokenColumns.of([1], [0.0], 0) != TokenColumns.of([1], [-0.0], 0)


def test_columns_without_a_token_have_no_version():
    empty = TokenColumns()
    assert (len(empty), empty.runs, empty.version_first, empty.version_last) == (0, [], None, None)
    assert empty == TokenColumns.of([], [], 3) and not empty


@pytest.mark.parametrize(("logprobs", "versions"), [([-1.0], [0, 0]), ([-1.0, -1.0], [0])])
def test_columns_that_do_not_align_are_refused(logprobs, versions):
    with pytest.raises(ValueError, match="do not align"):
        TokenColumns.of([1, 2], logprobs, versions)


def test_packed_columns_that_were_cut_are_refused():
    runs, tokens, logprobs, top_logprobs = pack([TokenColumns.of([1, 2], [-1.0, -1.0], 0)])
    with pytest.raises(ValueError, match="2 token ids, 1 log-probs"):
        unpack((runs, tokens, logprobs[:4], top_logprobs))
