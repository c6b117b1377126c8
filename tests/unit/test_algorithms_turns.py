"""Each turn of a trajectory has an advantage of its own (MT-GRPO)."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from test_algorithms_presets import MAX_TOKENS, large_batch
from trainer_doubles import make_trainer

from millrace.algorithms import build
from millrace.algorithms.advantages import group_advantages, turn_advantages
from millrace.algorithms.group import ComparedGroup, turns_of
from millrace.config.tables.algorithms import PolicyGradient
from millrace.core.types import Batch
from millrace.trainer.batch.flat_batch import flatten

NAN = float("nan")


def advantages_of(rewards, masks, turn_rewards, discount=1.0, scale="none"):
    turn_reward_arrays = [np.array(one, float) for one in turn_rewards]
    group = ComparedGroup.of(rewards, masks, turn_rewards=turn_reward_arrays)
    found = turn_advantages(group, scale=scale, baseline="group", discount=discount)
    return [one.tolist() for one in found]


def test_two_turns_worked_by_hand():
    # outcomes 1 and 0: O is 1/2 and -1/2. First turns 0 and 3: I is -3/2 and 3/2. The last turn has no I.
    masks = [[True, True, False, True], [True, False, True]]
    assert advantages_of([1, 0], masks, [[0, NAN], [3, NAN]]) == [[-1, -1, 0, 0.5], [1, 0, -0.5]]


def test_what_comes_later_is_discounted_once_a_turn():
    # O is 1 and -1. I of turn 2 is 2 and -2. A_3 = O, A_2 = I_2 + O / 2, A_1 = I_2 / 2 + O / 4
    masks = [[True, False] * 3] * 2
    found, other = advantages_of([2, 0], masks, [[NAN, 4, NAN], [NAN, 0, NAN]], discount=0.5)
    assert found == [1.25, 0, 2.5, 0, 1, 0]
    assert other == [-advantage for advantage in found]


def test_turns_are_compared_with_the_same_turn_of_those_that_have_it():
    # Turn 2 has a reward in the first two only: 1 and 0. Nobody can be compared with the third's turn 3.
    masks = [[True, False, True], [True, False, True], [True, False, True, False, True]]
    found = advantages_of([0, 0, 0], masks, [[NAN, 1], [NAN, 0], [NAN, NAN, 7]])
    assert found == [[0.5, 0, 0.5], [-0.5, 0, -0.5], [0, 0, 0, 0, 0]]


@given(
    st.lists(
        st.tuples(st.floats(-9, 9), st.lists(st.booleans(), min_size=1, max_size=9)), min_size=2, max_size=6
    )
)
def test_without_rewards_of_turns_it_is_grpo(members):
    rewards, masks = zip(*members, strict=True)
    group = ComparedGroup.of(rewards, masks)
    due_G = group_advantages(group, scale="std")
    found = turn_advantages(group, scale="std", baseline="group", discount=1.0)
    for advantages, due, mask in zip(found, due_G, masks, strict=True):
        np.testing.assert_allclose(advantages, np.where(mask, due, 0.0))


def test_a_turn_is_a_stretch_of_the_mask():
    assert turns_of(np.array([False, True, True, False, False, True])).tolist() == [-1, 0, 0, -1, -1, 1]
    assert turns_of(np.zeros(0, bool)).tolist() == []


def test_the_reward_function_names_the_rewards_of_turns():
    batch = large_batch()
    flat = flatten(batch, build(PolicyGradient(kind="mt_grpo", turn_discount=0.7)), max_tokens=MAX_TOKENS)
    nameless = [
        msgspec.structs.replace(
            group, sequences=[msgspec.structs.replace(s, metrics={"turn": 3.0}) for s in group.sequences]
        )
        for group in batch.groups
    ]
    plain = flatten(
        Batch(batch.version, nameless), build(PolicyGradient(kind="mt_grpo")), max_tokens=MAX_TOKENS
    )
    grpo = flatten(batch, build(PolicyGradient()), max_tokens=MAX_TOKENS)
    trained = grpo.weights_C > 0
    np.testing.assert_allclose(plain.advantages_C[trained], grpo.advantages_C[trained])
    assert np.abs(flat.advantages_C - plain.advantages_C)[trained].mean() > 0.1


def test_what_is_not_selected_has_no_turns():
    batch = large_batch()
    kept = PolicyGradient(kind="mt_grpo", select="shortest", keep=3)
    flat = flatten(batch, build(kept), max_tokens=MAX_TOKENS)
    assert (flat.trained_S > 0).sum() <= 3 * len(batch.groups)
    assert make_trainer(kept, max_tokens=MAX_TOKENS).accumulate(batch).num_rows > 0


def test_what_does_not_go_with_turns_is_refused():
    with pytest.raises(ValidationError, match=r"`algorithm.turn_discount` \(0.5\) compares turns"):
        PolicyGradient(kind="ppo", turn_discount=0.5)
    with pytest.raises(ValidationError, match=r"`algorithm.resample` \(1\) .* `algorithm.turn_discount`"):
        PolicyGradient(kind="mt_grpo", resample=1)
