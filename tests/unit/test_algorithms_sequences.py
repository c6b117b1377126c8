"""Credit for each sequence of a trajectory, alone and as the trainer gives it to tokens."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from test_algorithms_presets import MAX_TOKENS, found_gradient, tables
from test_trainer_forks import forked, gradient, in_turns
from trainer_doubles import make_batch

from millrace.algorithms import ComparedGroup, build
from millrace.algorithms.advantages import group_advantages, sequence_advantages, sequence_returns
from millrace.config.tables.algorithms import PolicyGradient
from millrace.core.completion.columns import TokenColumns
from millrace.core.completion.forks import Fork, continued
from millrace.core.types import Batch, TrainGroup, TrainSequence
from millrace.trainer.batch.flat_batch import flatten
from millrace.trainer.batch.packing import pack


def numbers(forks, stop):
    return [number for number, count in continued(forks, stop) for _ in range(count)]


def episode(tid, reward, turns, **metrics):
    """`turns`: of each turn after the first what it follows: a turn's number, or None without a fork."""
    columns, ends = TokenColumns.of([1], [-1.0], 0), [0, 1]
    for after in turns:
        if after is not None:
            columns.fork(ends[after], 0)
        columns.observe([2])
        columns.extend(TokenColumns.of([3], [-1.0], 0))
        ends.append(len(columns))
    return TrainSequence(tid, columns, reward, False, columns.sampled(), metrics)


def advantages_of(*members, **keys):
    config = PolicyGradient(scale="none", **keys)
    flat = flatten(Batch(0, [TrainGroup(0, [7], list(members))]), build(config), max_tokens=9)
    return [one[::2].tolist() for one in np.split(flat.advantages_C, np.cumsum(lengths(members))[:-1])]


def lengths(members):
    return [len(one.columns) for one in members]


def episodes(seed, groups=2, group_size=4):
    """Groups of trajectories of several turns and sequences, with rewards of some turns."""
    random = np.random.default_rng(seed)
    batch = forked(
        in_turns(make_batch(version=1, seed=seed, groups=groups, group_size=group_size)), seed=seed
    )
    rewarded_groups = []
    for group in batch.groups:
        rewards = [{f"turn_{k}": float(random.normal()) for k in (1, 2, 4)} for _ in group.sequences]
        pairs = zip(group.sequences, rewards, strict=True)
        members = [msgspec.structs.replace(one, metrics=metrics) for one, metrics in pairs]
        rewarded_groups.append(msgspec.structs.replace(group, sequences=members))
    return Batch(1, rewarded_groups)


# ------------------------------------------------------------ which tokens are one sequence


def test_an_agent_that_has_asked_another_goes_on_with_its_own_sequence():
    assert numbers([Fork(2, 0), Fork(4, 2)], 6) == [0, 0, 1, 1, 0, 0]


def test_a_summary_in_place_of_the_history_begins_a_sequence():
    assert numbers([Fork(2, 0), Fork(4, 0)], 5) == [0, 0, 1, 1, 2]


def test_only_the_first_that_follows_the_end_of_a_sequence_goes_on_with_it():
    assert numbers([Fork(2, 2), Fork(3, 2), Fork(4, 3), Fork(5, 4)], 6) == [0, 0, 0, 1, 0, 1]


def test_what_follows_the_middle_of_a_sequence_is_another_one():
    assert numbers([Fork(3, 1)], 5) == [0, 0, 0, 1, 1]


def test_without_forks_there_is_one_sequence():
    assert numbers([], 3) == [0, 0, 0]
    assert numbers([], 0) == []


# ------------------------------------------------------------ what a sequence earned


def test_two_agents_worked_by_hand():
    # Turns 1 and 3 are the first agent's, turn 2 is the second's. The rewards are 3 and 1: O is 1 and -1.
    # The second agents earned 1 and 2: I is -1/2 and 1/2. The first agents have the rest, 2 and -1: 3/2 and
    # -3/2.
    one, other = episode(0, 3.0, [0, 1], turn_2=1.0), episode(1, 1.0, [0, 1], turn_2=2.0, turn_1=5.0)
    assert advantages_of(one, other) == [[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]]
    assert advantages_of(one, other, sequence_share=1.0) == [[1.5, -0.5, 1.5], [-1.5, 0.5, -1.5]]
    assert advantages_of(one, other, sequence_share=0.5) == [[1.25, 0.25, 1.25], [-1.25, -0.25, -1.25]]


def test_a_sequence_is_compared_with_the_same_one_of_those_that_have_it():
    alone, two, three = episode(0, 6.0, []), episode(1, 0.0, [0]), episode(2, 3.0, [0, 0], turn_2=2.0)
    # First sequences: 6, 0, 0, mean 2. Second ones: 0 and 2. The only third one has no other beside it.
    found = advantages_of(alone, two, three, sequence_share=1.0)
    assert found == [[4.0], [-2.0, -1.0], [-2.0, 1.0, 0.0]]


def test_an_environment_may_divide_its_reward_at_the_end():
    """The last turn's own reward counts no more beside what is left of the trajectory's."""
    one, other = episode(0, 1.0, [0], turn_1=0.4, turn_2=1.0), episode(1, 0.0, [0], turn_1=0.0)
    found = advantages_of(one, other, sequence_share=1.0, baseline="none")
    assert found == [[0.4, 0.6], [0.0, 0.0]]


Trajectories = st.lists(
    st.tuples(
        st.floats(-9, 9), st.lists(st.tuples(st.integers(0, 3), st.floats(-9, 9)), min_size=1, max_size=6)
    ),
    min_size=2,
    max_size=5,
)
"""(reward, [(sequence, reward) of each turn])"""


def in_order(numbers):
    """Sequences have their numbers in order of their first turns."""
    return [list(dict.fromkeys(numbers)).index(number) for number in numbers]


def group_of(trajectories):
    masks = [[True, False] * len(turns) for _, turns in trajectories]
    turn_rewards = [np.array([reward for _, reward in turns]) for _, turns in trajectories]
    group = ComparedGroup.of([reward for reward, _ in trajectories], masks, turn_rewards=turn_rewards)
    own = [np.repeat(in_order([number for number, _ in turns]), 2) for _, turns in trajectories]
    return replace(group, sequence_of=own)


@given(Trajectories)
def test_sequences_earn_together_what_their_trajectory_earned(trajectories):
    group = group_of(trajectories)
    for returns_S, reward in zip(sequence_returns(group), group.rewards_G, strict=True):
        assert returns_S.sum() == pytest.approx(reward, abs=1e-12)


@given(Trajectories, st.floats(0, 1))
def test_one_sequence_in_each_trajectory_is_the_advantage_of_the_trajectory(trajectories, share):
    whole = [(reward, [(0, own) for _, own in turns]) for reward, turns in trajectories]
    group = group_of(whole)
    due_G = group_advantages(group, scale="std")
    found = sequence_advantages(group, scale="std", baseline="group", share=share)
    for advantages_T, due in zip(found, due_G, strict=True):
        np.testing.assert_allclose(advantages_T, due, atol=1e-9)


@given(Trajectories)
def test_a_baseline_leaves_no_sequence_number_an_advantage_on_average(trajectories):
    group = group_of(trajectories)
    found = sequence_advantages(group, scale="none", baseline="group", share=1.0)
    for number in range(4):
        pairs = zip(found, group.sequence_of, strict=True)
        own = [advantages_T[own_T == number][0] for advantages_T, own_T in pairs if number in own_T]
        assert sum(own) == pytest.approx(0.0, abs=1e-9)


# ------------------------------------------------------------ in the trainer


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 99),
    st.sampled_from([10_000, 60, 20, 1]),
    st.sampled_from(["token", "sequence", "max_tokens"]),
    st.sampled_from(["none", "std", "batch"]),
)
def test_how_many_rows_sequences_make_changes_no_gradient(seed, budget, normalize, scale):
    batch = episodes(seed)
    old, pi = tables(batch, seed)
    old, pi = np.nan_to_num(old, nan=-1.0), np.nan_to_num(pi, nan=-1.0)
    config = PolicyGradient(sequence_share=0.7, normalize=normalize, scale=scale)
    due = found_gradient(config, batch, old, pi, token_budget=100_000)
    found = found_gradient(config, batch, old, pi, token_budget=budget)
    assert np.abs(due).max() > 1e-6
    np.testing.assert_allclose(found, due, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("normalize", ["token", "sequence", "max_tokens"])
def test_every_sampled_token_is_trained_once_with_the_advantage_of_its_own_sequence(normalize):
    batch = episodes(3)
    share = build(PolicyGradient(sequence_share=1.0, scale="none", normalize=normalize))
    flat = flatten(batch, share, max_tokens=MAX_TOKENS)
    plain = flatten(batch, build(PolicyGradient(normalize=normalize)), max_tokens=MAX_TOKENS)
    assert np.array_equal(flat.weights_C, plain.weights_C)
    rows = pack(flat.minibatches[0], 20)
    where, times = np.unique(np.concatenate([row.flat_N for row in rows]), return_counts=True)
    assert (times == 1).all() and np.array_equal(where, np.flatnonzero(flat.weights_C))
    first, several = 0, 0
    for group in batch.groups:
        for one in group.sequences:
            own = np.array(numbers(one.columns.forks, len(one.columns)))
            advantages = flat.advantages_C[first : first + len(own)]
            values = [set(advantages[own == number]) for number in np.unique(own)]
            assert all(len(value) == 1 for value in values)
            several += len(set().union(*values)) > 1
            first += len(own)
    assert several >= 3


def test_what_goes_on_at_its_end_is_one_sequence_and_changes_nothing():
    batch = in_turns(make_batch(groups=2))
    algorithm = build(PolicyGradient(sequence_share=0.7))
    _, one = gradient(batch, algorithm, 10_000)
    _, several = gradient(forked(batch, complete=True), algorithm, 16)
    _, plain = gradient(batch, build(PolicyGradient()), 10_000)
    assert (several - one).norm() <= 5e-6 * max(1.0, one.norm())
    assert (plain - one).norm() <= 5e-6 * max(1.0, one.norm())


@pytest.mark.parametrize("budget", [16, 60])
def test_the_gradient_of_a_model_is_the_same_for_any_rows(budget):
    algorithm = build(PolicyGradient(sequence_share=0.7))
    _, one = gradient(episodes(5), algorithm, 10_000)
    _, several = gradient(episodes(5), algorithm, budget)
    _, shared = gradient(episodes(5), build(PolicyGradient()), 10_000)
    assert (several - one).norm() <= 5e-6 * max(1.0, one.norm())
    assert (shared - one).norm() > 0.1 * one.norm()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"turn_discount": 1.0}, "`algorithm.turn_discount` .* `algorithm.sequence_share`"),
        ({"baseline": "value", "scale": "none"}, "`algorithm.sequence_share` .* `algorithm.baseline`"),
        ({"resample": 1}, "`algorithm.resample` .* `algorithm.sequence_share`"),
        ({"overlong": 0.2}, "`algorithm.overlong` .* `algorithm.sequence_share`"),
        ({"kl": 0.1, "kl_in": "reward"}, "`algorithm.kl` .* `algorithm.sequence_share`"),
    ],
)
def test_what_does_not_go_with_sequences_is_refused(keys, words):
    with pytest.raises(ValidationError, match=words):
        PolicyGradient(sequence_share=0.5, **keys)
    PolicyGradient(sequence_share=0.5, kl=0.1)
