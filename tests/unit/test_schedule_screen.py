"""Screening: the decision, what a resumed run makes of it, and where it is refused."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as changed
from tests.unit.test_controller_state import NUMBERS, run_state

from millrace.algorithms.advantages import group_advantages
from millrace.algorithms.group import ComparedGroup
from millrace.config.tables.schedules import Synchronous
from millrace.config.tables.training import BatchShape
from millrace.core.completion.columns import TokenColumns, token_array
from millrace.core.types import Finish, Group, State, Trajectory
from millrace.schedule.admit import WhileNewest, screened_reward
from millrace.schedule.view import ReplicaView, View
from millrace_sim.explore.worlds import small_config

SIZE, FIRST = 5, 2
SCREENED = replace(NUMBERS, group_size=SIZE, screen_samples=FIRST)


@pytest.mark.parametrize(
    ("rewards", "out"), [([1, 1], 1), ([0, 0, 0], 0), ([0, 1], None), ([1], None), ([], None)]
)
def test_only_equal_rewards_of_two_or_more_screen_a_group_out(rewards, out):
    assert screened_reward(rewards) == out


def adopted(rewards, *, rest_leases=0):
    """The state after a resume, of one group: the first members have these rewards, None: not scored."""
    members = [Trajectory(k, 0, lease=1) for k in range(FIRST)]
    for member, reward in zip(members, rewards, strict=True):
        member.columns, member.finish = TokenColumns.of([5], [-1.0], 0), Finish.STOP
        member.state, member.reward = (State.GENERATED if reward is None else State.SCORED), reward
    members += [Trajectory(k, 0, lease=rest_leases) for k in range(FIRST, SIZE)]
    state = run_state(SCREENED, ["replica-0"])
    state.adopt(Group(0, "row-0", token_array([1, 2]), "text", members), birth=0)
    return state


def test_a_resumed_run_decides_from_the_rewards_in_the_ledger():
    assert list(adopted([0.0, 1.0]).queued) == [2, 3, 4]
    assert not adopted([0.0, None]).queued
    ended = adopted([1.0, 1.0])
    assert not ended.groups
    assert {t.reason for t in ended.ended} == {"screened out: its first 2 rewards are 1"}
    assert ended.screened == {"solved": 1}


def test_a_rest_that_has_started_goes_on_after_a_resume_with_other_settings():
    state = adopted([1.0, 1.0], rest_leases=1)
    assert list(state.queued) == [2, 3, 4]
    assert state.groups


def test_a_replica_has_room_for_more_groups_that_start_with_few_trajectories():
    replica = ReplicaView("a", 0, slots=8, kv_capacity_tokens=10_000)
    view = View(
        version=0,
        newest=0,
        pullable=(0,),
        steps_left=9,
        batch_groups=8,
        group_size=8,
        max_sequence_tokens=10,
        groups=(),
        replicas=(replica,),
    )
    screened = changed(view, screen_samples=2)
    assert WhileNewest().room(view, replica) == 2
    assert WhileNewest().room(screened, replica) == 5


@pytest.mark.parametrize("samples", [1, 8, 9])
def test_a_group_starts_with_two_or_more_and_leaves_a_rest(samples):
    with pytest.raises(ValueError, match=f"screen_samples` \\({samples}\\) must be 0, or at least 2"):
        BatchShape(group_size=8, screen_samples=samples)


ALGORITHMS = (
    {"kind": "reinforce"},
    {"kind": "ppo"},
    {"kind": "grpo", "turn_discount": 0.5},
    {"kind": "grpo", "teacher": "model"},
)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_it_is_refused_by_name_where_groups_of_equal_rewards_teach(algorithm):
    batch = BatchShape(group_size=4, screen_samples=2)
    with pytest.raises(ValueError, match=r"`batch.screen_samples` \(2\) ends groups whose first rewards"):
        small_config(Synchronous(), batch=batch, algorithm=algorithm)


def mean_gradients(probs, rewards, *, size, first):
    """Of a softmax over outcomes with these probabilities: without screening and with it, over all groups."""
    plain, screened, onehot = np.zeros(len(probs)), np.zeros(len(probs)), np.eye(len(probs))
    for outcomes in itertools.product(range(len(probs)), repeat=size):
        group = [rewards[k] for k in outcomes]
        advantages = group_advantages(ComparedGroup.of(group), scale="none")
        gradient = np.prod([probs[k] for k in outcomes]) * advantages @ (onehot[list(outcomes)] - probs)
        plain += gradient
        screened += gradient * (screened_reward(group[:first]) is None)
    return plain, screened


def angle(one, other):
    return math.degrees(math.acos(min(1.0, one @ other / np.linalg.norm(one) / np.linalg.norm(other))))


@pytest.mark.parametrize(
    ("probs", "rewards", "first", "degrees"),
    [
        ([0.3, 0.7], [0.0, 1.0], 2, 0.0),
        ([0.05, 0.95], [0.0, 1.0], 4, 0.0),
        ([0.8, 0.15, 0.05], [0.0, 0.1, 1.0], 2, 2.98),
        ([0.8, 0.15, 0.05], [0.0, 0.1, 1.0], 4, 1.15),
    ],
)
def test_screening_keeps_the_direction_of_two_rewards_and_turns_that_of_three(probs, rewards, first, degrees):
    plain, screened = mean_gradients(np.array(probs), rewards, size=6, first=first)
    assert angle(plain, screened) == pytest.approx(degrees, abs=0.01)
    assert 0 < np.linalg.norm(screened) < np.linalg.norm(plain)
