from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.algorithms.advantages import group_advantages, leave_one_out_advantages
from millrace.core.errors import DataError

REWARDS = st.lists(st.floats(-100, 100), min_size=2, max_size=16)


def test_centred_rewards_worked_by_hand():
    # mean (2 + 0 + 1) / 3 = 1
    assert group_advantages([2, 0, 1], scale="none").tolist() == [1.0, -1.0, 0.0]


def test_scaled_rewards_worked_by_hand():
    # mean 1/2, population standard deviation 1/2
    np.testing.assert_allclose(group_advantages([1, 0, 0, 1], scale="std"), [1, -1, -1, 1], rtol=1e-5)
    # mean 1, deviations (3, -1, -1, -1), standard deviation sqrt(12 / 4)
    root = math.sqrt(3)
    np.testing.assert_allclose(
        group_advantages([4, 0, 0, 0], scale="std"), [root, -1 / root, -1 / root, -1 / root], rtol=1e-5
    )


def test_leaving_one_out_worked_by_hand():
    # others' means: 0, 1/2, 1/2
    np.testing.assert_allclose(leave_one_out_advantages([1, 0, 0]), [1, -0.5, -0.5])


@pytest.mark.parametrize("scale", ["std", "none"])
def test_a_group_of_equal_rewards_teaches_nothing(scale):
    np.testing.assert_allclose(group_advantages([0.1] * 7, scale=scale), 0, atol=1e-9)


@given(REWARDS)
def test_advantages_sum_to_zero(rewards):
    for scale in ("std", "none"):
        assert abs(group_advantages(rewards, scale=scale).sum()) < 1e-6
    assert abs(leave_one_out_advantages(rewards).sum()) < 1e-6


@given(REWARDS, st.floats(-10, 10))
def test_a_constant_added_to_every_reward_changes_nothing(rewards, constant):
    shifted = [reward + constant for reward in rewards]
    np.testing.assert_allclose(
        group_advantages(rewards, scale="none"), group_advantages(shifted, scale="none"), atol=1e-9
    )


@pytest.mark.parametrize("rewards", [[1.0], [], [1.0, math.nan], [1.0, math.inf]])
def test_a_group_that_cannot_be_compared_is_refused(rewards):
    with pytest.raises(DataError):
        group_advantages(rewards, scale="std")
    with pytest.raises(DataError):
        leave_one_out_advantages(rewards)
