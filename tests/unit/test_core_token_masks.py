"""What could have come stays beside the token that did: on the wire, in the ledger, in every part."""

from __future__ import annotations

import pickle
from array import array
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


def chosen(sizes: list[int], columns: TokenColumns | None = None, top_logprobs: bool = False) -> TokenColumns:
    columns = TokenColumns() if columns is None else columns
    for position, size in enumerate(sizes, len(columns)):
        ids = array("i", [10 * position + rank for rank in range(size)])
        row = ([position, 7], [-0.5, -1.0]) if top_logprobs else None
        columns.append(ids[-1] if size else 3, -0.5, 4, row, ids.tobytes() if size else None)
    return columns


SIZES = st.lists(st.integers(0, 4), min_size=1, max_size=8)


@given(SIZES, st.integers(0, 8))
def test_parts_put_together_are_the_whole(sizes, cut):
    whole, joined = chosen(sizes), TokenColumns()
    joined.extend(whole[:cut])
    joined.extend(whole[cut:])
    assert joined == whole
    assert whole[:1] == chosen(sizes)[:1]


def test_every_token_could_come_where_nothing_is_told():
    columns = TokenColumns.of([1, 2], [-1.0, -1.0], 0)
    columns.extend(chosen([3]))
    columns.extend(TokenColumns.of([5], [-1.0], 0))
    assert columns.token_masks is not None
    assert columns.token_masks.counts.tolist() == [0, 0, 3, 0]
    assert columns[:2].token_masks is not None and columns[2:3].token_masks == chosen([3]).token_masks


@given(st.lists(SIZES, max_size=4), st.integers(2, 5))
def test_they_survive_the_wire(every, protocol):
    columns = [chosen(sizes) for sizes in every]
    assert unpack(pack(columns)) == columns
    assert pickle.loads(pickle.dumps(columns, protocol)) == columns
    report = Report([Progress(i, 0, 0, one) for i, one in enumerate(columns)], ReplicaLoad(3))
    assert pickle.loads(pickle.dumps(report, 5)) == report


@pytest.mark.parametrize("packed_by", [pack_plain, pack_squeezed])
@pytest.mark.parametrize("top_logprobs", [False, True])
def test_they_survive_the_codec_of_the_ledger(packed_by, top_logprobs):
    columns = chosen([3, 0, 1, 9], top_logprobs=top_logprobs)
    assert unpack_columns(packed_by(columns), pack_versions(columns.runs)) == columns


def test_a_ledger_gives_them_back_and_the_trainer_gets_them(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger, group = SqliteLedger(path, run={}), make_group(0)
    ledger.admit([group])
    for sizes in ([2, 3], [1, 4, 0]):  # in two chunks, and then in one
        for member in group.members:
            lease(member)
            chosen(sizes, member.columns)
        ledger.update(group.members)
        ledger.flush()
    for member in group.members:
        complete(member)
    ledger.update(group.members)
    ledger.commit_step(step_of(1, group))
    ledger.close()
    with LedgerReader(path) as reader:
        found = reader.trajectory(0)
    assert found.columns == chosen([2, 3, 1, 4, 0])
    (trained,) = make_batch(0, [group]).groups
    assert {one.columns == found.columns for one in trained.sequences} == {True}


def test_choices_that_were_cut_are_refused():
    columns = chosen([2, 3])
    assert columns.token_masks is not None
    with pytest.raises(ValueError, match="2 tokens, 4 choices at 2 positions"):
        beside = columns.token_masks.counts.tobytes(), columns.token_masks.tokens.tobytes()[:-4]
        TokenColumns.from_buffers(bytes(8), bytes(8), columns.runs, None, beside)
