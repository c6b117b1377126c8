"""Majority@k against the definition: the mean over all subsets of k completions."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest

from millrace.core.errors import DataError
from millrace.estimates.evaluation import classes, majority_at_k


def by_enumeration(answers: str, correct: str, k: int) -> float:
    """`correct` is the one correct answer."""
    subsets = list(combinations(answers, k))
    total = 0.0
    for subset in subsets:
        counts = Counter(subset)
        winners = [answer for answer, count in counts.items() if count == max(counts.values())]
        total += (correct in winners) / len(winners)
    return total / len(subsets)


@pytest.mark.parametrize("answers", ["aaaa", "aabb", "abcd", "aabbc", "abbbcc", "aaabbcd", "bbbbbba"])
def test_it_is_the_mean_over_all_subsets(answers: str) -> None:
    counted = classes(list(answers), [answer == "a" for answer in answers])
    for k in range(1, len(answers) + 1):
        assert majority_at_k(counted, k) == pytest.approx(by_enumeration(answers, "a", k), abs=1e-12)


def test_golden_values_worked_by_hand() -> None:
    aab = classes(["1", "1", "2"], [True, True, False])
    assert majority_at_k(aab, 3) == 1.0
    assert majority_at_k(aab, 2) == pytest.approx(2 / 3)  # {1,1} wins, {1,2} twice is a tie
    assert majority_at_k(aab, 1) == pytest.approx(2 / 3)


def test_an_answer_that_is_judged_otherwise_each_time_counts_by_its_share() -> None:
    assert majority_at_k(classes(["x", "x"], [True, False]), 2) == 0.5


@pytest.mark.parametrize("answers", ["a...", "aab..", "abb..c", "....", "aaab.."])
def test_completions_without_an_answer_are_drawn_and_have_no_vote(answers: str) -> None:
    votes = [answer for answer in answers if answer != "."]
    counted, silent = classes(votes, [answer == "a" for answer in votes]), answers.count(".")
    for k in range(1, len(answers) + 1):
        due = 0.0
        for subset in (subsets := list(combinations(answers, k))):
            counts = Counter(answer for answer in subset if answer != ".")
            winners = [answer for answer, count in counts.items() if count == max(counts.values())]
            due += ("a" in winners) / max(len(winners), 1)
        assert majority_at_k(counted, k, silent) == pytest.approx(due / len(subsets), abs=1e-12)


@pytest.mark.parametrize("k", [0, 3])
def test_impossible_counts_are_refused(k: int) -> None:
    with pytest.raises(DataError, match="majority@k needs"):
        majority_at_k(classes(["a", "b"], [True, False]), k)
