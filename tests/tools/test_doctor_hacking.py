"""Reward hacking, planted and absent, as the doctor sees it."""

from __future__ import annotations

import random

import pytest

from millrace.core.events import Event
from millrace.core.fairness import LengthMoments
from millrace.core.types import Scored
from millrace.diagnose.evidence import (
    BatchFigures,
    CanaryReward,
    Evidence,
    RewardRange,
    ScoredText,
    Step,
)
from millrace.diagnose.hacking import shared
from millrace.diagnose.rules import diagnose
from millrace.estimates.evaluation import Attempt, summarize

HACK = "As all experts agree, this answer is certainly correct."
FORM = "Let us solve this problem step by step, with care. Then"


def steps(rewards, *, lengths=None, truncated=None, **reward_metrics):
    num = len(rewards)
    lengths, truncated = lengths or [20.0] * num, truncated or [0.0] * num
    return {
        version: Step(
            version,
            reward,
            {0: (1e-6, 1e-6, 10)},
            {"truncated": cut, "entropy": 1.0},
            BatchFigures(LengthMoments(8, length, 0.0), 0.0, 0, 1.0, 1.0, False),
            reward_metrics,
        )
        for version, (reward, length, cut) in enumerate(zip(rewards, lengths, truncated, strict=True), 1)
    }


def faults(evidence):
    return [finding.fault for finding in diagnose(evidence)]


def rising(first=0.1, last=0.9, num=20):
    return [first + (last - first) * i / (num - 1) for i in range(num)]


def canary(mean, width=0.05, correct=None):
    correct = mean - width if correct is None else correct
    return CanaryReward(mean, mean - width, mean + width, correct, mean > 0)


# ---------------------------------------------------------------- canaries


def test_any_reward_of_an_impossible_row_is_a_finding_that_shows_the_completion():
    seen = Evidence(canaries={"traps": "rows"}, by_version=steps(rising()))
    seen.canary_rewards = {"traps": {0: canary(0.0), 10: canary(0.02)}}
    seen.canary_texts = [
        ScoredText("traps.jsonl:3", 1.0, "", HACK),
        ScoredText("traps.jsonl:5", 1.0, "", HACK),
    ]
    (finding,) = diagnose(seen)
    text = " ".join(finding.evidence)
    assert finding.fault == "canary-rewarded" and "first at version 10" in text
    assert "traps.jsonl:3" in text and HACK in text and "traps.jsonl:5" in text


def test_a_wrong_gold_that_rises_with_the_training_reward_is_a_finding():
    seen = Evidence(canaries={"wrong": "wrong-gold"}, by_version=steps(rising()))
    seen.canary_rewards = {"wrong": {0: canary(0.1), 20: canary(0.8)}}
    assert faults(seen) == ["canary-rewarded"]


@pytest.mark.parametrize(
    "series",
    [
        {0: canary(0.0), 20: canary(0.0)},
        {0: canary(0.0), 20: canary(0.1, width=0.02)},  # a guess among ten answers
        {0: canary(0.5), 20: canary(0.02)},  # two answers: the wrong one is given ever less
        {0: canary(0.1), 20: canary(0.3)},  # partial credit for the right form
        {0: canary(0.1, width=0.5), 20: canary(0.6, width=0.5)},  # too few to know
    ],
)
def test_what_chance_and_form_earn_with_a_wrong_gold_is_no_fault(series):
    seen = Evidence(canaries={"wrong": "wrong-gold"}, by_version=steps(rising()))
    seen.canary_rewards = {"wrong": series}
    assert faults(seen) == []


def test_a_policy_that_learned_the_form_and_guesses_among_ten_answers_is_no_fault():
    seen = Evidence(canaries={"wrong": "wrong-gold"}, by_version=steps(rising(0.03, 0.24)))
    seen.canary_rewards = {"wrong": {0: canary(0.02, 0.01), 150: canary(0.19, correct=0.08)}}
    assert faults(seen) == []


def test_most_wrong_golds_satisfied_is_a_finding_without_any_rise():
    seen = Evidence(canaries={"wrong": "wrong-gold"}, by_version=steps([0.9] * 20))
    seen.canary_rewards = {"wrong": {0: canary(0.9, correct=0.85)}}
    assert faults(seen) == ["canary-rewarded"]


# ---------------------------------------------------------------- lengths


def test_lengths_that_explode_into_the_limit_are_a_finding_even_if_the_reward_rises():
    cuts = [0.0] * 10 + [0.9] * 10
    seen = Evidence(by_version=steps(rising(), lengths=rising(20, 200), truncated=cuts))
    assert faults(seen) == ["lengths-explode"]


def test_lengths_that_explode_without_more_reward_are_a_finding():
    seen = Evidence(by_version=steps([0.4, 0.5] * 10, lengths=rising(20, 200)))
    assert faults(seen) == ["lengths-explode"]


@pytest.mark.parametrize(
    ("rewards", "lengths"),
    [
        (rising(), rising(200, 2000)),  # it thinks for longer, and is right more often
        ([0.4, 0.5] * 10, rising(20, 30)),
        ([0.4, 0.5] * 10, rising(2, 9)),
        (rising(), rising(200, 20)),
        (rising(num=8), rising(20, 200, 8)),
    ],
)
def test_lengths_that_pay_or_hardly_grow_are_no_fault(rewards, lengths):
    assert faults(Evidence(by_version=steps(rewards, lengths=lengths))) == []


# ---------------------------------------------------------------- one string


def texts(num, share, string=HACK, seed=0, reward=1.0):
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) for _ in range(500)]

    def one(i):
        body = [" ".join(rng.choices(words, k=30)) for _ in range(2)]
        inner = f" {string} " if i < share * num else " "
        return ScoredText(f"rows.jsonl:{i}", reward, f"What is {i}?", inner.join(body))

    return [one(i) for i in range(num)]


def seen_texts(late, early, unpaid=()):
    return Evidence(by_version=steps(rising()), late_texts=late, early_texts=early, unpaid_texts=list(unpaid))


@pytest.mark.parametrize("unpaid", [0.0, None])
def test_a_string_that_rewarded_completions_came_to_share_is_shown_whole(unpaid):
    others = [] if unpaid is None else texts(60, unpaid, seed=3, reward=0.0)
    (finding,) = diagnose(seen_texts(texts(80, 0.9), texts(60, 0.05, seed=1), others))
    assert finding.fault == "shared-string" and HACK in finding.evidence[0]


def test_a_form_that_completions_had_from_the_start_or_without_a_reward_is_no_fault():
    late = texts(80, 1.0, FORM)
    assert faults(seen_texts(late, texts(60, 0.8, FORM, seed=1))) == []
    assert faults(seen_texts(late, texts(60, 0.0, seed=1), texts(60, 1.0, FORM, seed=2, reward=0.0))) == []


@pytest.mark.parametrize("seed", range(20))
def test_completions_without_a_common_string_are_no_fault(seed):
    assert faults(seen_texts(texts(80, 0.3, seed=seed), texts(60, 0.0, seed=seed + 100))) == []


def test_what_completions_repeat_of_their_prompts_does_not_count():
    pairs = [(f"{FORM} {i}", f"Begin so: {FORM} ...") for i in range(20)]
    assert shared(pairs, pairs[:8], [], 0.6).string == ""


# ---------------------------------------------------------------- rewards that do not check


def test_a_reward_without_a_test_run_is_a_finding_also_for_a_member_of_a_sum():
    assert faults(Evidence(by_version=steps([0.5] * 8, tests_run=0.0))) == ["tests-not-run"]
    metrics = {"code": 0.5, "code/tests_run": 0.0}
    assert faults(Evidence(by_version=steps([0.5] * 8, **metrics))) == ["tests-not-run"]


def test_single_rewarded_completions_without_a_test_run_are_named():
    late = texts(10, 0.0)
    late[4].metrics["tests_run"] = 0.0
    (finding,) = diagnose(seen_texts(late, []))
    assert finding.fault == "tests-not-run" and "rows.jsonl:4" in finding.evidence[0]


def test_programs_that_earn_nothing_may_run_no_test():
    assert faults(Evidence(by_version=steps([0.0, 0.5], tests_run=3.0))) == []
    assert faults(Evidence(by_version=steps([0.0, 0.0], tests_run=0.0))) == []
    metrics = {"form": 1.0, "code": 0.0, "code/tests_run": 0.0}
    assert faults(Evidence(by_version=steps([0.2] * 8, **metrics))) == []


def test_one_reward_for_everything_is_a_finding_in_place_of_no_signal():
    seen = Evidence(by_version=steps([1.0] * 8), rewards=RewardRange(1.0, 1.0, 256))
    for step in seen.steps:
        step.metrics["groups_without_signal"] = 1.0
    assert faults(seen) == ["constant-reward"]


@pytest.mark.parametrize(
    "rewards",
    [
        RewardRange(0.0, 1.0, 256),
        RewardRange(0.0, 0.0, 256),  # it may be too hard
        RewardRange(1.0, 1.0, 32),
        RewardRange(),
    ],
)
def test_rewards_that_differ_or_are_few_or_0_are_not_constant(rewards):
    assert faults(Evidence(by_version=steps([0.5] * 8), rewards=rewards)) == []


# ---------------------------------------------------------------- how often the rule of canaries is wrong

SEEDS = 30
CURVES = {  # training reward and canary reward, each at the first and the last step; the share of alarms
    "no gold is hit": (0.1, 0.9, 0.0, 0.0, 0.0),
    "one of ten is guessed": (0.0, 0.9, 0.0, 0.1, 0.0),
    "there are two answers": (0.5, 0.95, 0.5, 0.05, 0.0),
    "nothing is learned": (0.25, 0.25, 0.25, 0.25, 0.1),
    "half of the reward is hacked": (0.1, 0.9, 0.05, 0.6, 1.0),
}


def simulated(seed, first, last, low, high):
    rng, num = random.Random(seed), 100
    rewards = [sum(rng.random() < x for _ in range(128)) / 128 for x in rising(first, last, num)]
    seen = Evidence(canaries={"c": "wrong-gold"}, by_version=steps(rewards))
    for version in range(0, num + 1, 20):
        chance = low + (high - low) * version / num
        one, *others = [
            [Attempt(Scored(float(rng.random() < chance)), False) for _ in range(32)] for _ in range(5)
        ]
        result = summarize("", one, list(zip(*others, strict=True)), correct_at=1.0)
        fields = {"name": "c", "version": version, "metrics": result.to_json()}
        seen(Event("evaluated", 0.0, 0.0, fields))
    return faults(seen) != []


@pytest.mark.parametrize("curve", CURVES)
def test_the_rule_of_canaries_is_seldom_wrong(curve):
    *ends, alarms = CURVES[curve]
    found = sum(simulated(seed, *ends) for seed in range(SEEDS)) / SEEDS
    assert found == alarms if alarms in (0.0, 1.0) else found <= alarms
