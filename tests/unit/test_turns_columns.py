"""Columns with observed tokens between turns."""

from __future__ import annotations

import math
import pickle

from millrace.core.completion.columns import OBSERVED, TokenColumns, pack, unpack
from millrace.core.completion.top_logprobs import TopLogprobs
from millrace.ledger.codec import pack_plain, pack_squeezed, pack_versions, unpack_columns


def episode() -> TokenColumns:
    columns = TokenColumns.of([5, 6, 7], [-0.5, -0.25, -1.0], [3, 3, 4])
    columns.observe([8, 9])
    columns.extend(TokenColumns.of([5], [-0.125], 4))
    return columns


def test_observed_tokens_have_no_log_prob_and_no_version_and_are_not_trained() -> None:
    columns = episode()
    assert columns.versions() == [3, 3, 4, OBSERVED, OBSERVED, 4]
    assert [math.isnan(logprob) for logprob in columns.logprobs] == [False] * 3 + [True] * 2 + [False]
    assert columns.sampled() == [True, True, True, False, False, True]
    assert columns.turns() == [(0, 3, True), (3, 5, False), (5, 6, True)]
    assert (columns.version_first, columns.version_last) == (3, 4)
    assert columns.sampled_runs == [(3, 2), (4, 1), (4, 1)]


def test_one_turn_is_as_before() -> None:
    columns = TokenColumns.of([5, 6], [-1.0, -2.0], 0)
    assert columns.sampled() is None
    assert (columns.turn_start, columns.version_open) == (0, 0)
    assert (TokenColumns().turn_start, TokenColumns().version_open, TokenColumns().version_last) == (
        0,
        None,
        None,
    )


def test_a_turn_that_has_no_token_may_begin_under_any_version() -> None:
    columns = TokenColumns.of([5, 6], [-1.0, -2.0], 3)
    columns.observe([8])
    assert (columns.turn_start, columns.version_open, columns.version_last) == (3, None, 3)
    columns.extend(TokenColumns.of([5], [-1.0], 4))
    assert (columns.turn_start, columns.version_open) == (3, 4)


def test_observed_tokens_survive_the_ledger_and_the_wire() -> None:
    columns = episode()
    for packed in (pack_plain(columns), pack_squeezed(columns)):
        assert unpack_columns(packed, pack_versions(columns.runs)) == columns
    assert unpack(pack([columns, episode()])) == [columns, columns]
    assert pickle.loads(pickle.dumps(columns, protocol=5)) == columns
    assert columns[:4].turns() == [(0, 3, True), (3, 4, False)]


def test_what_is_recorded_beside_the_tokens_stays_aligned() -> None:
    columns = TokenColumns.of([5], [-1.0], 0)
    columns.top_logprobs = TopLogprobs(2)
    columns.top_logprobs.append(([5, 6], [-0.5, -1.5]))
    columns.token_masks = None
    columns.append(6, -1.0, 0, ([6, 5], [-0.5, -1.5]), b"\x06\0\0\0")
    columns.observe([8, 9, 10])
    assert columns.top_logprobs.aligned(5) and columns.token_masks.aligned(5)
    assert [len(row) for row in columns.top_logprobs.rows()] == [2, 2, 0, 0, 0]
