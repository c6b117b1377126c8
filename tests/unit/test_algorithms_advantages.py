from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.algorithms import build
from millrace.algorithms.advantages import group_advantages, leave_one_out_advantages, whitened
from millrace.algorithms.group import ComparedGroup, overlong_penalty, selected
from millrace.config.tables.algorithms import PolicyGradient
from millrace.core.errors import DataError

REWARDS = st.lists(st.floats(-100, 100), min_size=2, max_size=16)


def test_centred_rewards_worked_by_hand():
    # mean (2 + 0 + 1) / 3 = 1
    assert group_advantages(ComparedGroup.of([2, 0, 1]), scale="none").tolist() == [1.0, -1.0, 0.0]


def test_scaled_rewards_worked_by_hand():
    # mean 1/2, population standard deviation 1/2
    np.testing.assert_allclose(
        group_advantages(ComparedGroup.of([1, 0, 0, 1]), scale="std"), [1, -1, -1, 1], rtol=1e-5
    )
    # mean 1, deviations (3, -1, -1, -1), standard deviation sqrt(12 / 4)
    root = math.sqrt(3)
    np.testing.assert_allclose(
        group_advantages(ComparedGroup.of([4, 0, 0, 0]), scale="std"),
        [root, -1 / root, -1 / root, -1 / root],
        rtol=1e-5,
    )


def test_leaving_one_out_worked_by_hand():
    # others' means: 0, 1/2, 1/2
    np.testing.assert_allclose(leave_one_out_advantages(ComparedGroup.of([1, 0, 0])), [1, -0.5, -0.5])


@pytest.mark.parametrize("baseline", ["group", "others"])
@pytest.mark.parametrize("scale", ["std", "mean", "none"])
def test_a_group_of_equal_rewards_teaches_nothing(scale, baseline):
    """Not even a rounding error: the mean of three rewards of 0.1 is more than 0.1."""
    for size in (3, 7):
        found = group_advantages(ComparedGroup.of([0.1] * size), scale=scale, baseline=baseline)
        assert found.tolist() == [0.0] * size


@given(REWARDS)
def test_advantages_sum_to_zero(rewards):
    for scale in ("std", "none"):
        assert abs(group_advantages(ComparedGroup.of(rewards), scale=scale).sum()) < 1e-6
    assert abs(leave_one_out_advantages(ComparedGroup.of(rewards)).sum()) < 1e-6


@given(REWARDS, st.floats(-10, 10))
def test_a_constant_added_to_every_reward_changes_nothing(rewards, constant):
    shifted = [reward + constant for reward in rewards]
    np.testing.assert_allclose(
        group_advantages(ComparedGroup.of(rewards), scale="none"),
        group_advantages(ComparedGroup.of(shifted), scale="none"),
        atol=1e-7,  # rewards that are equal but for rounding have no advantage: rounding grows with them
    )


@pytest.mark.parametrize("rewards", [[1.0], [], [1.0, math.nan], [1.0, math.inf]])
def test_a_group_that_cannot_be_compared_is_refused(rewards):
    with pytest.raises(DataError):
        ComparedGroup.of(rewards)


def test_a_group_counts_tokens_and_turns():
    masks = [[True, True, False, False, True], [False, True], [False]]
    group = ComparedGroup.of([1.0, 0.0, 0.5], masks, [True, False, False])
    assert group.lengths_G.tolist() == [5, 2, 1]
    assert group.trained_G.tolist() == [3, 1, 0]
    assert group.turns_G.tolist() == [2, 1, 0]
    assert group.truncated_G.tolist() == [True, False, False]


def of_lengths(rewards, lengths, max_tokens=0):
    return ComparedGroup.of(rewards, [[True] * length for length in lengths], max_tokens=max_tokens)


def test_rewards_over_their_mean_worked_by_hand():
    # one of four is right: (1 - 1/4) / (1/4) = 3, and -1 for the others
    found = group_advantages(ComparedGroup.of([1, 0, 0, 0]), scale="mean")
    np.testing.assert_allclose(found, [3, -1, -1, -1], rtol=1e-5)
    assert group_advantages(ComparedGroup.of([0, 0]), scale="mean").tolist() == [0, 0]


def test_without_a_baseline_an_advantage_is_the_reward():
    assert group_advantages(ComparedGroup.of([2, 0, -1]), scale="none", baseline="none").tolist() == [
        2,
        0,
        -1,
    ]


def test_tokens_of_a_batch_are_whitened_together():
    # mean 1, standard deviation sqrt(6 / 5)
    found = whitened(np.array([3.0, 1.0, 0.0, 0.0, 1.0]))
    np.testing.assert_allclose(found, np.array([2, 0, -1, -1, 0]) / math.sqrt(1.2), rtol=1e-5)
    assert whitened(np.full(3, 0.1)).tolist() == [0.0] * 3


def test_the_shortest_and_the_most_efficient_are_kept():
    group = of_lengths([1.0, 0.0, 1.0, 0.5], [8, 1, 2, 2])
    assert selected(group, select="shortest", keep=2).tolist() == [False, True, True, False]
    assert selected(group, select="efficient", keep=2).tolist() == [False, False, True, True]
    assert selected(group, select="positive", keep=None).tolist() == [True, False, True, True]


def test_what_is_left_out_is_no_part_of_the_baseline_and_is_not_trained():
    group, algorithm = (
        of_lengths([1.0, 0.0, 0.0, 0.0, 9.0], [1, 2, 3, 4, 9]),
        build(PolicyGradient(kind="gfpo", scale="none")),
    )
    assert algorithm.advantages(group).tolist() == [0.75, -0.25, -0.25, -0.25, 0.0]
    assert algorithm.trained(group).tolist() == [True] * 4 + [False]


def test_only_what_was_rewarded_is_imitated():
    group, algorithm = ComparedGroup.of([1.0, 0.0, -1.0]), build(PolicyGradient(kind="raft"))
    assert algorithm.trained(group).tolist() == [True, False, False]
    assert algorithm.advantages(group).tolist() == [1.0, 0.0, 0.0]
    assert algorithm.advantages(ComparedGroup.of([0.0, 0.0])).tolist() == [0.0, 0.0]


def test_overlong_completions_are_punished_as_they_near_the_budget():
    group = of_lengths([1.0] * 4, [70, 80, 95, 100], max_tokens=100)
    assert overlong_penalty(group, fraction=0.2).tolist() == pytest.approx([0.0, 0.0, 0.75, 1.0])
    found = build(PolicyGradient(kind="dapo", scale="none")).advantages(group)
    np.testing.assert_allclose(found, np.array([1, 1, 0.25, 0]) - 0.5625)
    assert overlong_penalty(group, fraction=0.0).tolist() == [0.0] * 4
