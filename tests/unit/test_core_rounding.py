"""Rewards that differ by rounding alone are equal, wherever equal rewards decide something."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.unit.test_controller_state import NUMBERS, run_state

from millrace.algorithms import build
from millrace.algorithms.advantages import group_advantages, whitened
from millrace.algorithms.group import ComparedGroup, selected
from millrace.config.tables.algorithms import PolicyGradient
from millrace.config.tables.task import RestSelection
from millrace.controller.row_selection import RowRecord, keep_probability
from millrace.core.completion.columns import TokenColumns, token_array
from millrace.core.rounding import all_equal, reaches
from millrace.core.types import Batch, Finish, Group, Scored, State, TrainGroup, TrainSequence, Trajectory
from millrace.estimates.evaluation import Attempt, summarize
from millrace.run.event_sources import spread
from millrace.schedule.admit import screened_reward
from millrace.trainer.metrics import batch_metrics, value_metrics
from millrace_curation.row_measures import GOLD, GoldScore, judge_gold

EQUAL = [
    [0.1 + 0.2, 0.3],
    [0.7 + 0.2 + 0.1, 1.0, 0.1 + 0.2 + 0.7],
    [0.1 + 0.2 - 0.3, 0.0],
    [1e3 * 0.1 - 100, 1e3 * (0.1 + 0.2) - 300.0],
    [float(np.float32(0.1) + np.float32(0.2)), 0.3],
    [-0.3, -0.1 - 0.2],
    [1e6 * 0.3, 1e6 * (0.1 + 0.2)],
]
DIFFERENT = [[0.3, 0.30001], [0.0, 1e-6], [1e6, 1e6 + 1], [-1.0, 1.0], [0.0, 1e-10]]
COMPARED: list[dict[str, Any]] = [
    {"scale": "std"},
    {"scale": "none"},
    {"scale": "mean"},
    {"scale": "std", "baseline": "others"},
    {"scale": "none", "baseline": "others"},
]
ALMOST_1 = 0.7 + 0.2 + 0.1


def test_the_cases_are_what_they_say() -> None:
    assert all(len(set(rewards)) > 1 for rewards in EQUAL)
    assert ALMOST_1 < 1.0


@pytest.mark.parametrize("rewards", EQUAL)
@pytest.mark.parametrize("settings", COMPARED)
def test_rewards_equal_but_for_rounding_have_no_advantage(
    rewards: list[float], settings: dict[str, Any]
) -> None:
    assert not group_advantages(ComparedGroup.of(rewards), **settings).any()


@pytest.mark.parametrize("rewards", DIFFERENT)
@pytest.mark.parametrize("settings", [each for each in COMPARED if each["scale"] != "mean"])
def test_small_differences_are_a_signal(rewards: list[float], settings: dict[str, Any]) -> None:
    assert not all_equal(rewards)
    assert group_advantages(ComparedGroup.of(rewards), **settings).all()


@pytest.mark.parametrize("rewards", EQUAL)
def test_turns_sequences_and_whole_batches_have_no_advantage_by_rounding(rewards: list[float]) -> None:
    assert not whitened(np.array(rewards)).any()
    for config in (PolicyGradient(turn_discount=0.9), PolicyGradient(sequence_share=0.5)):
        group = ComparedGroup.of(rewards, [np.ones(2, bool)] * len(rewards))
        assert not np.concatenate(build(config).advantages(group)).any()


@pytest.mark.parametrize("rewards", EQUAL)
def test_a_group_without_signal_is_screened_out_replaced_rested_and_counted(rewards: list[float]) -> None:
    assert screened_reward(rewards) == rewards[0]
    row = RowRecord()
    row.add(rewards, correct_at=1.0, discount=1.0)
    assert keep_probability(RestSelection(groups=1, retry=0.2), row) == 0.2
    batch = Batch(0, [TrainGroup(0, [1], [sequence(i, reward) for i, reward in enumerate(rewards)])])
    assert batch_metrics(batch)["groups_without_signal"] == 1.0
    assert value_metrics(np.zeros(len(rewards)), np.array(rewards))["value_explained"] == 0.0


def sequence(trajectory_id: int, reward: float) -> TrainSequence:
    columns = TokenColumns.of([5], [-1.0], 0)
    return TrainSequence(trajectory_id=trajectory_id, columns=columns, reward=reward, truncated=False)


@pytest.mark.parametrize(("rewards", "replaced"), [(EQUAL[1], True), ([0.3, 0.3, 0.30001], False)])
def test_dynamic_sampling_replaces_a_group_whose_rewards_differ_by_rounding(
    rewards: list[float], replaced: bool
) -> None:
    members = [scored(k, reward) for k, reward in enumerate(rewards)]
    state = run_state(replace(NUMBERS, group_size=len(rewards), resampled_max=4), ["replica-0"])
    state.adopt(Group(0, "row-0", token_array([1, 2]), "text", members), birth=0)
    assert (State.REJECTED in {one.state for one in state.ended}) == replaced


def scored(trajectory_id: int, reward: float) -> Trajectory:
    one = Trajectory(trajectory_id, 0, lease=1)
    one.columns, one.finish = TokenColumns.of([5], [-1.0], 0), Finish.STOP
    one.state, one.reward = State.SCORED, reward
    return one


def test_samples_of_a_group_that_differ_by_rounding_are_one() -> None:
    assert list(spread([scored(k, reward) for k, reward in enumerate(EQUAL[0])])) == ["best"]


def test_a_sum_that_is_1_but_for_rounding_is_correct() -> None:
    assert reaches(ALMOST_1, 1.0) and not reaches(0.9999, 1.0) and reaches(2.0, 1.0)
    row = RowRecord()
    row.add([ALMOST_1] * 4, correct_at=1.0, discount=1.0)
    assert (row.solved, row.hopeless, row.correct) == (1, 0, 4)
    attempt = Attempt(Scored(ALMOST_1), False)
    found = summarize("model", [attempt], [[attempt, attempt]], correct_at=1.0)
    assert (found.greedy_accuracy, found.sampled_accuracy, found.pass_at_k[2]) == (1.0, 1.0, 1.0)
    assert judge_gold({GOLD: GoldScore(ALMOST_1)}, 1.0) is None


def test_what_remains_of_a_sum_to_0_was_not_rewarded() -> None:
    group = ComparedGroup.of([0.1 + 0.2 - 0.3, 1.0])
    assert selected(group, select="positive", keep=None).tolist() == [False, True]
