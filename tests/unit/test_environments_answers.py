"""What a completion answers, for majorities."""

from __future__ import annotations

from millrace.config.tables.task import (
    ExactRewardSection,
    FunctionRewardSection,
    GymRewardSection,
    MathRewardSection,
)
from millrace.episodes.reward_worker import LONGEST, make_answer


def test_it_is_what_the_reward_extracts() -> None:
    assert make_answer(ExactRewardSection(extract="= (.+)"))("1 + 1 = 2 ") == "2"
    assert make_answer(GymRewardSection())(" 42\n") == "42"
    assert make_answer(ExactRewardSection(extract="= (.+)"))("I do not know") == ""


def test_equal_mathematics_is_one_answer() -> None:
    answer = make_answer(MathRewardSection())
    assert answer(r"so \boxed{\frac{2}{4}}") == answer(r"thus \boxed{\frac{1}{2}}") != ""


def test_of_a_function_it_is_the_whole_completion_and_long_ones_stay_apart() -> None:
    answer = make_answer(FunctionRewardSection(path="x:y"))
    one, other = answer("a" * 500), answer("a" * 499 + "b")
    assert one != other and len(one) <= LONGEST
