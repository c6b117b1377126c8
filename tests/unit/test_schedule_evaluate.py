"""Which versions are evaluated, how hard, and when it is enough."""

from __future__ import annotations

import pytest

from millrace.controller.evaluation.due import DueVersions, best, due, rest_s, since_best


def test_the_start_model_each_k_steps_and_the_last_version_are_due() -> None:
    assert due(4, 0, 10, last=10) == [0, 4, 8, 10]
    assert due(4, 5, 9, last=10) == [8]
    assert due(4, 9, 8, last=10) == []


def test_a_newer_version_takes_the_place_of_one_that_waits() -> None:
    waiting = DueVersions()
    assert waiting.add("a", 4) is None
    assert waiting.add("b", 4) is None
    assert waiting.add("a", 8) == 4
    assert waiting.wanted == {"a": 8, "b": 4}


def test_what_leaves_the_relay_first_goes_first() -> None:
    waiting = DueVersions({"a": 8, "b": 4, "c": 9})
    assert waiting.next((4, 8), (4, 8)) == ("b", 4)
    assert waiting.next((8,), (4, 8)) == ("a", 8)  # another relay has version 4, and this one gets it
    assert waiting.next((), ()) is None


def test_in_place_of_what_no_relay_has_the_nearest_newer_version_is_evaluated() -> None:
    waiting = DueVersions({"a": 8, "b": 4})
    assert waiting.next((), ()) is None  # a relay that is just restarted
    assert waiting.next((3,), (3,)) is None  # its version is not there yet
    assert waiting.next((3, 7, 9), (3, 7, 9)) == ("b", 7)
    assert waiting.next((7,), (4, 7)) is None
    assert waiting.next((9,), (9,)) == ("a", 9)
    assert waiting.wanted == {"a": 8, "b": 4}


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
def test_with_its_rests_it_computes_for_its_share_of_the_time(share: float) -> None:
    assert 3.0 / (3.0 + rest_s(3.0, share)) == pytest.approx(share)


def test_the_first_of_equal_versions_is_the_best() -> None:
    assert best([(0, 0.1), (4, 0.5), (8, 0.5), (12, None)]) == 4
    assert best([(0, None)]) is None
    assert best([]) is None


def test_only_evaluations_that_measured_something_count_as_no_better() -> None:
    assert since_best([(0, 0.1), (4, 0.5), (8, 0.5), (12, None), (16, 0.4)]) == 2
    assert since_best([(0, 0.1), (4, 0.5)]) == 0
    assert since_best([(0, None), (4, None)]) == 0
