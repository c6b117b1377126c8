from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.errors import DataError
from millrace.trainer.batch.packing import Branch, Tree, pack


def branch(tokens, first_index, mask=None):
    return Branch(tokens, np.ones(len(tokens), bool) if mask is None else np.asarray(mask, bool), first_index)


def shown(row):
    return [(segment.start, segment.length, segment.prefix_P.tolist()) for segment in row.segments]


@st.composite
def forests(draw):
    trees, first = [], 0
    for _ in range(draw(st.integers(1, 4))):
        branches = []
        for _ in range(draw(st.integers(1, 4))):
            mask = draw(st.lists(st.booleans(), min_size=0, max_size=6))
            tokens = draw(st.lists(st.integers(0, 2), min_size=len(mask), max_size=len(mask)))
            branches.append(branch(tokens, first, mask))
            first += len(mask)
        trees.append(Tree(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)), branches))
    return trees


def test_a_full_row_gets_no_further_tree_and_a_tree_is_cut_at_the_budget_only():
    trees = [Tree([1], [branch([2] * length, 0)]) for length in (9, 6, 3, 2)]
    rows = pack(trees, 10, full=6)
    assert [len(row.tokens_T) for row in rows] == [9, 6, 5]
    assert [len(row.tokens_T) for row in pack(trees, 10)] == [9, 9, 2]


def test_a_tree_is_its_prompt_once_and_its_completions():
    (row,) = pack([Tree([1, 2], [branch([3, 4, 5], 0), branch([6, 7], 3)])], 100)
    # the last token of a completion has no successor to predict, so it is not forwarded
    assert row.tokens_T.tolist() == [1, 2, 3, 4, 6]
    assert row.positions_T.tolist() == [0, 1, 2, 3, 2]
    assert shown(row) == [(0, 4, []), (4, 1, [0, 1])]
    assert row.sources_N.tolist() == [1, 2, 3, 1, 4]
    assert row.targets_N.tolist() == [3, 4, 5, 6, 7]
    assert row.flat_N.tolist() == [0, 1, 2, 3, 4]


def test_what_completions_begin_with_is_forwarded_once():
    (row,) = pack([Tree([1], [branch([5, 6, 9, 0], 0), branch([5, 7, 0], 4), branch([5, 6, 8, 0], 7)])], 100)
    assert row.tokens_T.tolist() == [1, 5, 6, 8, 9, 7]
    assert row.positions_T.tolist() == [0, 1, 2, 3, 3, 2]
    assert shown(row) == [(0, 4, []), (4, 1, [0, 1, 2]), (5, 1, [0, 1])]
    assert row.flat_N.tolist() == [7, 8, 9, 10, 0, 1, 2, 3, 4, 5, 6]
    assert row.sources_N.tolist() == [0, 1, 2, 3, 0, 1, 2, 4, 0, 1, 5]


def test_equal_completions_are_one_stretch_and_all_are_trained():
    (row,) = pack([Tree([1, 2], [branch([3, 4, 5], 3 * i) for i in range(3)])], 100)
    assert shown(row) == [(0, 4, [])]
    assert row.flat_N.tolist() == list(range(9))
    assert row.sources_N.tolist() == [1, 2, 3] * 3


def test_what_follows_the_last_trained_token_is_not_forwarded():
    (row,) = pack([Tree([1], [branch([2, 3, 4, 5], 0, [False, True, False, False])])], 100)
    assert row.tokens_T.tolist() == [1, 2]
    assert row.targets_N.tolist() == [3]
    assert row.flat_N.tolist() == [1]


def test_a_tree_over_the_budget_is_split_and_its_prompt_repeated():
    rows = pack([Tree([1, 1, 1], [branch([2 + i] * 4, 4 * i) for i in range(4)])], 9)
    assert [len(row.tokens_T) for row in rows] == [9, 9]
    assert all(row.tokens_T[:3].tolist() == [1, 1, 1] for row in rows)


def test_a_sequence_over_the_budget_gets_a_row_of_its_own():
    rows = pack([Tree([1], [branch([2] * 20, 0)]), Tree([1], [branch([3] * 3, 20)])], 8)
    assert sorted(len(row.tokens_T) for row in rows) == [3, 20]


@given(forests(), st.integers(4, 60))
def test_every_trained_token_is_read_exactly_once_from_its_predecessor(trees, budget):
    rows = pack(trees, budget)
    seen = np.concatenate([row.flat_N for row in rows]) if rows else np.array([])
    branches = [b for tree in trees for b in tree.branches]
    trained = [b.first_index + i for b in branches for i in np.flatnonzero(b.mask)]
    assert sorted(seen.tolist()) == sorted(trained)
    expected = {
        b.first_index + i: (
            ([*tree.prompt, *b.tokens])[len(tree.prompt) + i - 1],
            len(tree.prompt) + i - 1,
            token,
        )
        for tree in trees
        for b in tree.branches
        for i, token in enumerate(b.tokens)
    }
    for row in rows:
        for source, target, flat in zip(row.sources_N, row.targets_N, row.flat_N, strict=True):
            assert (row.tokens_T[source], row.positions_T[source], target) == expected[flat]


@given(forests(), st.integers(4, 60))
def test_rows_keep_the_budget_and_stretches_cover_them(trees, budget):
    for row in pack(trees, budget):
        size = len(row.tokens_T)
        assert size <= budget or sum(len(segment.prefix_P) == 0 for segment in row.segments) == 1
        covered = sorted(
            i for segment in row.segments for i in range(segment.start, segment.start + segment.length)
        )
        assert covered == list(range(size))


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(DataError, match="no token"):
        pack([Tree([], [branch([1], 0)])], 10)


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(DataError, match="2 entries for 1 tokens"):
        pack([Tree([1], [branch([1], 0, [True, True])])], 10)
