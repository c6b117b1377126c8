from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainer_doubles import make_batch

from millrace.algorithms import build
from millrace.config.tables.algorithms import PolicyGradient
from millrace.trainer.batch.flat_batch import flatten
from millrace.trainer.batch.packing import balanced, pack, rows_of_rank, share_of_row
from millrace.trainer.ranks.mesh import ALONE, Ranks


def packed(budget: int = 40):
    return pack(flatten(make_batch(groups=6), build(PolicyGradient()), max_tokens=24).minibatches[0], budget)


@given(st.lists(st.integers(1, 1000), max_size=30), st.integers(1, 6))
def test_every_row_goes_to_one_share_and_shares_have_as_many(sizes, num_shares):
    shares = balanced(sizes, num_shares)
    assert sorted(index for share in shares for index in share) == list(range(len(sizes)))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 6))
def test_shares_differ_by_at_most_the_longest_row(sizes, num_shares):
    tokens = [sum(sizes[index] for index in share) for share in balanced(sizes, num_shares)]
    assert max(tokens) - min(tokens) <= max(sizes)


def test_rows_of_like_size_are_run_at_the_same_time():
    assert balanced([10, 90, 11, 91, 50, 51], 2) == [[3, 4, 2], [1, 5, 0]]


def test_one_process_trains_on_all_rows_in_their_order():
    rows = packed()
    assert rows_of_rank(rows, ALONE) == rows


@pytest.mark.parametrize("shape", [{"shard": 3}, {"sequence": 3}, {"shard": 2, "sequence": 2, "tensor": 2}])
def test_all_ranks_run_as_many_rows_and_train_on_every_token_once(shape):
    rows, world = packed(), Ranks(**shape).world
    shares = [rows_of_rank(rows, Ranks(**shape, rank=rank)) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    trained = np.concatenate([row.flat_N for share in shares for row in share])
    due = np.concatenate([row.flat_N for row in rows])
    assert np.array_equal(np.sort(trained), np.sort(np.repeat(due, Ranks(**shape).tensor)))


@pytest.mark.parametrize("count", [2, 3, 7])
def test_the_parts_of_a_row_are_equal_and_read_the_same_tokens(count):
    for row in packed():
        parts = [share_of_row(row, index, count) for index in range(count)]
        assert len({len(each.tokens_T) for each in parts}) == 1
        tokens = np.concatenate([each.tokens_T for each in parts])
        assert np.array_equal(tokens[: len(row.tokens_T)], row.tokens_T)
        assert sum(segment.length for segment in parts[0].segments) == len(tokens)
        begins = np.arange(count) * len(parts[0].tokens_T)
        sources = np.concatenate([each.sources_N + begin for each, begin in zip(parts, begins, strict=True)])
        by_token = dict(zip(row.flat_N.tolist(), zip(row.sources_N, row.targets_N, strict=True), strict=True))
        flat, targets = (
            np.concatenate([getattr(e, name) for e in parts]) for name in ("flat_N", "targets_N")
        )
        assert {f: pair for f, *pair in zip(flat.tolist(), sources, targets, strict=True)} == {
            token: list(pair) for token, pair in by_token.items()
        }


def test_a_rank_without_a_row_runs_one_that_trains_nothing():
    (row,) = packed(budget=10_000)
    first, second = (rows_of_rank([row], Ranks(shard=2, rank=rank)) for rank in range(2))
    assert first == [row]
    assert len(second) == 1 and not len(second[0].flat_N)
