from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.algorithms.advantages import group_advantages, leave_one_out_advantages
from millrace.algorithms.group import Group
from millrace.core.errors import DataError

REWARDS = st.lists(st.floats(-100, 100), min_size=2, max_size=16)


def test_centred_rewards_worked_by_hand():
    # mean (2 + 0 + 1) / 3 = 1
    assert group_advantages(Group.of([2, 0, 1]), scale="none").tolist() == [1.0, -1.0, 0.0]


def test_scaled_rewards_worked_by_hand():
    # mean 1/2, population standard deviation 1/2
    np.testing.assert_allclose(
        group_advantages(Group.of([1, 0, 0, 1]), scale="std"), [1, -1, -1, 1], rtol=1e-5
    )
    # mean 1, deviations (3, -1, -1, -1), standard deviation sqrt(12 / 4)
    root = math.sqrt(3)
    np.testing.assert_allclose(
        group_advantages(Group.of([4, 0, 0, 0]), scale="std"),
        [root, -1 / root, -1 / root, -1 / root],
        rtol=1e-5,
    )


def test_leaving_one_out_worked_by_hand():
    # others' means: 0, 1/2, 1/2
    np.testing.assert_allclose(leave_one_out_advantages(Group.of([1, 0, 0])), [1, -0.5, -0.5])


@pytest.mark.parametrize("scale", ["std", "none"])
def test_a_group_of_equal_rewards_teaches_nothing(scale):
    np.testing.assert_allclose(group_advantages(Group.of([0.1] * 7), scale=scale), 0, atol=1e-9)


@given(REWARDS)
def test_advantages_sum_to_zero(rewards):
    for scale in ("std", "none"):
        assert abs(group_advantages(Group.of(rewards), scale=scale).sum()) < 1e-6
    assert abs(leave_one_out_advantages(Group.of(rewards)).sum()) < 1e-6


@given(REWARDS, st.floats(-10, 10))
def test_a_constant_added_to_every_reward_changes_nothing(rewards, constant):
    shifted = [reward + constant for reward in rewards]
    np.testing.assert_allclose(
        group_advantages(Group.of(rewards), scale="none"),
        group_advantages(Group.of(shifted), scale="none"),
        atol=1e-9,
    )


@pytest.mark.parametrize("rewards", [[1.0], [], [1.0, math.nan], [1.0, math.inf]])
def test_a_group_that_cannot_be_compared_is_refused(rewards):
    with pytest.raises(DataError):
        Group.of(rewards)


def test_a_group_counts_tokens_and_turns():
    masks = [[True, True, False, False, True], [False, True], [False]]
    group = Group.of([1.0, 0.0, 0.5], masks, [True, False, False])
    assert group.lengths_G.tolist() == [5, 2, 1]
    assert group.trained_G.tolist() == [3, 1, 0]
    assert group.turns_G.tolist() == [2, 1, 0]
    assert group.truncated_G.tolist() == [True, False, False]
