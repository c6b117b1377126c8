"""Which rows rest, by the rewards of their trained groups."""

from __future__ import annotations

import numpy as np
import pytest

from millrace.config.tables.task import RestSelection, SignalSelection
from millrace.controller.row_selection import RowRecord, RowSelection, draw, keep_probability
from millrace.core.completion.columns import token_array
from millrace.core.types import RESTS, GroupOutcome, Prompt

SOLVED, HOPELESS, MIXED = [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0]


def row(*groups, discount=1.0):
    record = RowRecord()
    for rewards in groups:
        record.add(list(rewards), correct_at=1.0, discount=discount)
    return record


def prompt(group_id, row_id="row"):
    return Prompt(group_id, row_id, token_array([1]), "text")


def selection(config, *groups, seed=0):
    chosen = RowSelection(config, seed)
    for version, rewards in enumerate(groups, 1):
        chosen.take_in(version, [GroupOutcome(version, "row", list(rewards))])
    return chosen


@pytest.mark.parametrize("groups", [(SOLVED, SOLVED), (HOPELESS, HOPELESS), (MIXED, SOLVED, SOLVED)])
def test_a_row_rests_after_groups_without_signal(groups):
    assert keep_probability(RestSelection(retry=0.2), row(*groups)) == 0.2


@pytest.mark.parametrize("groups", [(SOLVED,), (SOLVED, HOPELESS), (SOLVED, SOLVED, MIXED), ()])
def test_a_row_does_not_rest_before_or_after_a_group_with_signal(groups):
    assert keep_probability(RestSelection(retry=0.2), row(*groups)) == 1.0


def test_partial_credit_is_a_signal_even_if_no_reward_is_correct():
    assert keep_probability(RestSelection(groups=1), row([0.2, 0.4])) == 1.0
    assert keep_probability(RestSelection(groups=1, retry=0.2), row([0.2, 0.2])) == 0.2


def test_by_signal_a_row_is_taken_with_four_times_the_variance_of_its_rewards():
    config = SignalSelection(retry=0.05)
    assert keep_probability(config, row(MIXED)) == 1.0
    assert keep_probability(config, row(SOLVED)) == pytest.approx(4 * (5 / 6) * (1 / 6))
    assert keep_probability(config, row(*[SOLVED] * 100)) == 0.05


def test_older_groups_count_less():
    assert row(SOLVED, HOPELESS, discount=0.5).pass_rate == pytest.approx((2 + 1) / (6 + 2))
    assert row(SOLVED, HOPELESS, discount=0.0).pass_rate == pytest.approx(1 / 6)


def test_the_share_that_is_tried_again_is_retry():
    chosen = selection(RestSelection(retry=0.1), SOLVED, SOLVED)
    taken = sum(not chosen.why_rests(prompt(group_id)) for group_id in range(20_000))
    assert taken / 20_000 == pytest.approx(0.1, abs=0.01)


def test_a_decision_is_a_function_of_seed_group_and_what_was_learned():
    one, other = (selection(RestSelection(), SOLVED, SOLVED) for _ in range(2))
    there = [one.why_rests(prompt(group_id)) for group_id in range(100)]
    back = [other.why_rests(prompt(group_id)) for group_id in reversed(range(100))]
    assert there == back[::-1]
    assert [draw(0, group_id) for group_id in range(9)] != [draw(1, group_id) for group_id in range(9)]


def test_the_order_in_which_a_step_lists_its_groups_changes_nothing():
    groups = [GroupOutcome(7, "row", SOLVED), GroupOutcome(3, "row", HOPELESS)]
    chosen = [RowSelection(SignalSelection(), 0) for _ in range(2)]
    chosen[0].take_in(1, groups)
    chosen[1].take_in(1, groups[::-1])
    assert len({tuple(c.why_rests(prompt(i)) for i in range(50)) for c in chosen}) == 1


def test_a_row_that_was_never_trained_is_taken_and_so_is_every_row_without_selection():
    chosen = selection(RestSelection(retry=0.01), SOLVED, SOLVED)
    assert not any(chosen.why_rests(prompt(group_id, "another")) for group_id in range(500))
    assert RowSelection(None, 0).why_rests(prompt(0)) == "" and RowSelection(None, 0).figures() == {}


def test_the_reason_says_what_the_row_did_and_the_figures_count_it():
    chosen = selection(RestSelection(retry=0.01), SOLVED, SOLVED)
    reasons = [reason for group_id in range(50) if (reason := chosen.why_rests(prompt(group_id)))]
    assert reasons[0] == f"{RESTS}solved in its last 2 groups, pass rate 0.900 at version 2"
    assert chosen.figures()["selection"] == {
        "rested": len(reasons),
        "rows": 1,
        "solved": 1.0,
        "hopeless": 0.0,
    }
    assert chosen.figures()["selection"]["rested"] == 0


@pytest.mark.parametrize(("rate", "size", "taken"), [(0.05, 8, 0.36), (0.02, 8, 0.27), (0.05, 16, 0.28)])
def test_by_signal_a_rare_row_is_taken_more_often_than_its_own_rate_says(rate, size, taken):
    """The figures of docs/data.md, over 2,000 histories of six groups."""
    random = np.random.default_rng(0)
    groups = (random.random((2000, 6, size)) < rate).astype(float)
    chances = [keep_probability(SignalSelection(), row(*history, discount=0.5)) for history in groups]
    assert np.mean(chances) == pytest.approx(taken, abs=0.01)
    assert np.mean(chances) > 4 * rate * (1 - rate)
