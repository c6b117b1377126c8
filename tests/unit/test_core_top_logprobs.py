"""Likely tokens stay beside the token that was sampled there: on the wire, in the ledger, in every part."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_records import complete, lease, make_group, step_of

from millrace.controller.state.groups import make_batch
from millrace.core.completion.columns import TokenColumns, pack, unpack
from millrace.core.types import Progress, ReplicaLoad, Report
from millrace.ledger import SqliteLedger
from millrace.ledger.codec import pack_plain, pack_squeezed, pack_versions, unpack_columns
from millrace.ledger.reading import LedgerReader

NUM = 3


def grown(columns: TokenColumns, num_tokens: int, num: int = NUM) -> TokenColumns:
    for position in range(len(columns), len(columns) + num_tokens):
        ids = [10 * position + rank for rank in range(num)]
        columns.append(ids[-1], -0.5, 4, (ids, [-0.25 * (rank + 1) for rank in range(num)]))
    return columns


def likely_tokens(num_tokens: int, num: int = NUM) -> TokenColumns:
    return grown(TokenColumns(), num_tokens, num)


@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 4))
def test_parts_put_together_are_the_whole(size, cut, num):
    whole = likely_tokens(size, num)
    joined = TokenColumns()
    joined.extend(whole[:cut])
    joined.extend(whole[cut:])
    assert joined == whole
    assert whole[:1] == likely_tokens(1, num)


@given(st.lists(st.integers(0, 5), max_size=4), st.integers(2, 5))
def test_they_survive_the_wire(sizes, protocol):
    columns = [
        likely_tokens(size) if i % 2 else TokenColumns.of([i], [-1.0], 0) for i, size in enumerate(sizes)
    ]
    assert unpack(pack(columns)) == columns
    assert pickle.loads(pickle.dumps(columns, protocol)) == columns
    report = Report([Progress(i, 0, 0, one) for i, one in enumerate(columns)], ReplicaLoad(3))
    assert pickle.loads(pickle.dumps(report, 5)) == report


@pytest.mark.parametrize("packed_by", [pack_plain, pack_squeezed])
@pytest.mark.parametrize("num", [1, 5])
def test_they_survive_the_codec_of_the_ledger(packed_by, num):
    columns = likely_tokens(7, num)
    assert unpack_columns(packed_by(columns), pack_versions(columns.runs)) == columns


def test_a_ledger_gives_them_back_with_the_trajectory_and_the_trainer_gets_none(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger, group = SqliteLedger(path, run={}), make_group(0)
    ledger.admit([group])
    for num_tokens in (2, 3):  # in two chunks, and then in one
        for member in group.members:
            lease(member)
            grown(member.columns, num_tokens)
        ledger.update(group.members)
        ledger.flush()
    for member in group.members:
        complete(member)
    ledger.update(group.members)
    ledger.commit_step(step_of(1, group))
    ledger.close()
    with LedgerReader(path) as reader:
        found = reader.trajectory(0)
    assert found.columns == likely_tokens(5)
    (trained,) = make_batch(0, [group]).groups
    assert {one.columns.top_logprobs for one in trained.sequences} == {None}
    assert trained.sequences[0].columns.tokens == found.columns.tokens


def test_a_row_has_the_tokens_that_could_come():
    columns = TokenColumns()
    columns.append(7, -0.5, 0, ([7, 8, 1], [-0.5, -1.0, float("-inf")]))
    assert columns.top_logprobs is not None
    assert list(columns.top_logprobs.rows()) == [[(7, -0.5), (8, -1.0)]]


@pytest.mark.parametrize(
    ("first", "second"), pairwise([likely_tokens(2), TokenColumns.of([1], [-1.0], 0), likely_tokens(2, 1)])
)
def test_tokens_with_and_without_do_not_mix(first, second):
    with pytest.raises(ValueError, match="do not align"):
        first[:].extend(second)


def test_likely_tokens_that_were_cut_are_refused():
    columns = likely_tokens(2)
    assert columns.top_logprobs is not None
    with pytest.raises(ValueError, match="2 tokens, 3 likely ones"):
        TokenColumns.from_buffers(bytes(8), bytes(8), columns.runs, columns.top_logprobs.part(0, 1))
