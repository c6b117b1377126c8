"""Fits of times, and lengths drawn from observed groups."""

import pytest

from millrace.core.errors import DataError
from millrace_sim.calibrate.observed import ObservedGroups
from millrace_sim.calibrate.replica_costs import fit


def test_a_fit_finds_the_coefficients_of_exact_data():
    rows = [(1, 5, 0), (2, 3, 7), (4, 4, 1), (3, 9, 2)]
    assert fit(rows, [2 * a + 0.5 * b + 3 * c for a, b, c in rows]) == pytest.approx([2, 0.5, 3])


def test_a_coefficient_that_would_be_negative_is_zero_and_the_others_make_up_for_it():
    rows = [(1, 1), (1, 2), (1, 3)]
    assert fit(rows, [3, 2, 1]) == pytest.approx([2, 0])


def test_columns_that_depend_on_each_other_or_are_empty_do_not_break_a_fit():
    assert fit([(1, 2, 0), (2, 4, 0), (3, 6, 0)], [3, 6, 9]) == pytest.approx([3, 0, 0])
    assert fit([(0, 0)], [1]) == [0, 0]


def test_observed_groups_keep_their_members_together():
    observed = ObservedGroups.of([1, 2, 30, 40, 5, 0], group_size=2)
    assert observed.groups == ((1, 2), (30, 40)), "a group with a completion missing is left out"
    drawn = {tuple(observed.draw(0, 2 * group + member) for member in (0, 1)) for group in range(50)}
    assert drawn == {(1.0, 2.0), (30.0, 40.0)}


def test_a_run_without_one_whole_group_is_refused():
    with pytest.raises(DataError, match="not one group"):
        ObservedGroups.of([3, 0], group_size=2)
