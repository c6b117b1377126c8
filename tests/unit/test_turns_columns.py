"""Columns with observed tokens between turns."""

from __future__ import annotations

import math
import pickle
from array import array

from millrace.core.completion.columns import OBSERVED, TokenColumns, pack, token_array, unpack
from millrace.core.completion.forks import Fork
from millrace.core.completion.top_logprobs import TopLogprobs
from millrace.core.turns.packed import pack_answer, pack_request, unpack_answer, unpack_request
from millrace.core.turns.turn_bounds import TurnBounds
from millrace.core.types import Failed, Finish, Observed, Scored, ScoreRequest
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


def test_requests_and_answers_cross_unchanged() -> None:
    tokens, prompt = token_array([5, 6]), token_array([1, 2, 3])
    forked = {"forks": [Fork(2, 0, 2)], "turns": [(0, 2, True)], "logprobs": array("f", [-0.5, -1.0])}
    requests = (
        ScoreRequest(1, 2, tokens, Finish.TURN),
        ScoreRequest(1, 2, tokens, Finish.STOP, room=9, spent_s=0.5, prompt=prompt, **forked),
        ScoreRequest(1, 2, token_array(), Finish.TURN, row_digest="d", begins=True, known=7),
    )
    for request in requests:
        packed = pickle.loads(pickle.dumps(pack_request(request)))
        assert unpack_request(packed) == request and isinstance(unpack_request(packed).finish, Finish)
    bounded = TurnBounds(max_tokens=4, stop=("\n",), stop_ids=(0,))
    answers = (
        Observed(tokens),
        Observed(tokens, {"tries": 2.0}, after=1, kept=2, bounds=bounded, begins=True),
        Scored(0.5, {"correct": 1.0}, "7", truncated=True),
        Failed("it raised"),
    )
    for answer in answers:
        assert unpack_answer(pickle.loads(pickle.dumps(pack_answer(answer)))) == answer
    assert pack_answer(None) is None
