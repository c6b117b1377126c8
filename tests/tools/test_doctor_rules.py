"""The doctor's rules on evidence of a few numbers."""

from __future__ import annotations

import random
import re

import pytest

from millrace.config.schema import Config
from millrace.config.tree import leaves
from millrace.core.events import Event
from millrace.core.fairness import LengthMoments, fairness
from millrace.diagnose.evidence import BatchFigures, Evidence, ServedPull, Step
from millrace.diagnose.examine import evidence_of
from millrace.diagnose.finding import few
from millrace.diagnose.learning import needless_staleness, unfair_batches
from millrace.diagnose.rules import diagnose

SPREAD = 3.0


def evidence(gaps=(1e-6,) * 8, *, dtype="float32", **metrics):
    """One step per gap at staleness 0."""
    steps = [Step(i + 1, 0.5, {0: (gap, 2 * gap, 10)}, dict(metrics)) for i, gap in enumerate(gaps)]
    return Evidence(dtype, by_version={step.version: step for step in steps})


def faults(seen):
    return [finding.fault for finding in diagnose(seen)]


def test_no_evidence_at_all_is_no_fault():
    assert faults(Evidence()) == []


def test_a_served_digest_that_nobody_published_is_wrong_weights():
    seen = evidence()
    seen.published, seen.pulls = {3: {"aa"}}, [ServedPull("replica-1", 3, "bb")]
    (finding,) = diagnose(seen)
    assert (
        finding.fault == "wrong-weights" and "replica-1 served digest bb as version 3" in finding.evidence[0]
    )


def test_a_version_that_was_published_twice_may_be_served_as_either():
    seen = evidence()
    seen.published, seen.pulls = (
        {3: {"aa", "bb"}},
        [ServedPull("r", 3, "bb"), ServedPull("r", 4, "of an earlier session")],
    )
    assert faults(seen) == []


def test_a_run_that_ended_on_a_digest_had_wrong_weights():
    seen = evidence()
    seen.end = "DigestMismatchError: weights version 4 in slot 1 have digest x"
    assert faults(seen) == ["wrong-weights"]


@pytest.mark.parametrize("gaps", [(1e-6, 1e-6, 0.02, 1e-6), (1e-6, 1e-3, 5e-3, 2e-2), (0.3, 0.5, 0.4, 0.6)])
def test_a_gap_that_comes_grows_or_is_large_throughout_is_wrong_weights(gaps):
    assert faults(evidence(gaps)) == ["wrong-weights"]


def test_a_steady_gap_is_numeric_and_expected_in_bfloat16():
    assert faults(evidence((0.01, 0.012, 0.009))) == ["numeric-gap"]
    assert faults(evidence((0.01, 0.012, 0.009), dtype="bfloat16")) == []
    assert faults(evidence((0.002, 0.02, 0.009), dtype="bfloat16")) == []


def test_a_quantised_run_is_judged_by_a_bound_of_its_own():
    assert faults(evidence((0.15, 0.12, 0.09), dtype="fp8")) == []
    assert faults(evidence((0.02, 0.02, 0.3), dtype="fp8")) == ["wrong-weights"]
    assert faults(evidence((0.5, 0.5, 0.5), dtype="fp8")) == ["wrong-weights"]
    (finding,) = diagnose(evidence((0.3, 0.3, 0.3), dtype="fp8"))
    assert finding.fault == "numeric-gap" and "rounding in fp8 explains 0.2" in finding.evidence[0]
    assert "leave `rollout.quantization` out, or `trainer.quantization`" in finding.advice[1]


def test_the_evidence_of_a_quantised_run_is_in_its_format():
    model, task, reward = (
        {"path": "m", "dtype": "bfloat16"},
        {"kind": "gym", "name": "chain_sum"},
        {"kind": "gym"},
    )
    config = {"model": model, "task": task, "reward": reward}
    rollout = {"engine": "vllm", "quantization": "fp8"}
    assert evidence_of(Config.model_validate(config | {"rollout": rollout})).dtype == "fp8"
    assert evidence_of(Config.model_validate(config | {"trainer": {"quantization": "fp8"}})).dtype == "fp8"
    assert evidence_of(Config.model_validate(config)).dtype == "bfloat16"


def test_under_penalties_and_cuts_the_gap_says_nothing_about_weights():
    for gaps in ((0.5,) * 8, (1e-6, 0.5, 0.01)):
        seen = evidence(gaps)
        assert faults(seen)
        seen.plain = False
        assert faults(seen) == []


@pytest.mark.parametrize(
    ("sampling", "plain"),
    [
        ({"temperature": 0.7, "ignore_eos": True}, True),
        ({"top_p": 0.9}, True),
        ({"top_p": 0.9, "token_masks": False}, False),
        ({"presence_penalty": 1}, False),
    ],
)
def test_evidence_tells_whether_tokens_come_from_the_policy_itself(sampling, plain):
    task, reward = {"kind": "gym", "name": "chain_sum"}, {"kind": "gym"}
    config = {"model": {"path": "m"}, "task": task, "reward": reward, "sampling": sampling}
    assert evidence_of(Config.model_validate(config)).plain is plain


def test_gaps_after_a_swap_alone_say_nothing_about_weights():
    assert faults(evidence((0.5, 1e-6), gap_after_swap=0.5)) == []


@pytest.mark.parametrize(
    "end", ["TrainingError: the loss is nan: not finite", "WeightsError: logits not finite"]
)
def test_a_run_that_ended_on_numbers_that_are_not_finite_diverged(end):
    seen = evidence()
    seen.end = end
    assert faults(seen) == ["diverging-optimizer"]


def test_a_rising_gradient_norm_diverges_and_explains_the_rest():
    seen = evidence(groups_without_signal=1.0)
    for version, step in seen.by_version.items():
        step.metrics["grad_norm"] = 0.1 * 4.0**version
    assert faults(seen) == ["diverging-optimizer"]


def test_groups_without_signal_may_be_replaced_unless_the_algorithm_is_one_s_own():
    for algorithm, may_resample in (("grpo", True), ("function", False)):
        seen = evidence(groups_without_signal=1.0)
        seen.algorithm = algorithm
        (finding,) = diagnose(seen)
        assert finding.fault == "no-signal"
        assert any("`algorithm.resample`" in advice for advice in finding.advice) == may_resample


def test_equal_rewards_are_no_fault_where_a_critic_or_a_teacher_judges_tokens():
    seen = evidence(groups_without_signal=1.0)
    seen.compares = False
    assert faults(seen) == []


def test_a_few_failed_rewards_are_no_fault():
    seen = evidence()
    seen.outcomes.update({"scored": 96, "failed": 4})
    assert faults(seen) == []
    seen.outcomes["failed"] = 40
    assert faults(seen) == ["failing-rewards"]


def test_two_independent_faults_are_both_told():
    seen = evidence((0.01,) * 4)
    seen.outcomes.update({"scored": 1, "failed": 1})
    assert faults(seen) == ["failing-rewards", "numeric-gap"]


def of_batches(means, *, schedule="", ready=0, staleness=0.0, wait_s=1.0, replayed=False):
    """One step per mean length, each of 8 groups with a standard deviation of 3; a step takes 1 s."""
    seen = Evidence(schedule=schedule)
    for version, mean in enumerate(means, 1):
        figures = BatchFigures(LengthMoments(8, mean, SPREAD), staleness, ready, 1.0, wait_s, replayed)
        seen.by_version[version] = Step(version, 0.5, {}, {}, figures)
    return seen


def random_means(num):
    """Of 8 random groups each."""
    rng = random.Random(3)
    return [10 + rng.gauss(0, SPREAD / 8**0.5) for _ in range(num)]


def test_batches_that_alternate_for_long_are_unfair_and_the_schedule_s_own_key_is_named():
    for schedule, key in [("areal", "`schedule.eta`"), ("millrace", "`schedule.ahead`")]:
        (finding,) = diagnose(of_batches([7, 13] * 24, schedule=schedule))
        assert finding.fault == "unfair-batches" and key in finding.advice[1]
        assert "over the last 32 batches fairness is 4." in finding.evidence[0]


def test_fair_batches_and_too_few_unfair_ones_are_no_fault():
    assert faults(of_batches(random_means(200))) == []
    assert faults(of_batches([7, 13] * 15)) == []


def test_lengths_that_drift_over_a_run_are_not_unfair():
    means = random_means(3200)
    drifting = [mean + 10 * i / 3200 for i, mean in enumerate(means)]
    assert unfair_batches(of_batches(drifting)) is None
    assert fairness([LengthMoments(8, mean, SPREAD) for mean in drifting]) > 3  # as one window


def test_lengths_that_hardly_differ_cannot_be_chosen_unfairly():
    """A run of the README's task: all answers have five letters, and the policy moves all lengths at once."""
    means = [6.0, 6.0, 5.5, 5.8, 6.1, 6.8, 7.0, 7.6, 7.6, 7.6, 7.5, 7.3, 7.0, 6.6, 6.4, 6.0] * 2
    seen = Evidence(schedule="millrace")
    for version, mean in enumerate(means, 1):
        figures = BatchFigures(LengthMoments(8, mean, 0.3), 1.5, 0, 1.0, 1.0, False)
        seen.by_version[version] = Step(version, 0.5, {}, {}, figures)
    assert fairness([step.batch.lengths for step in seen.steps]) > 5
    assert faults(seen) == []


def test_a_policy_that_learns_shorter_completions_is_not_unfair():
    """A run of the tutorial's task: completions of eight tokens become completions of four in 30 steps."""
    rng = random.Random(0)
    means = [8.0 - 4 * i / 32 + rng.gauss(0, 0.3) for i in range(32)]
    means += [4 + rng.gauss(0, 1 / 8**0.5) for _ in range(32)]
    seen = Evidence(schedule="millrace")
    for version, mean in enumerate(means, 1):
        figures = BatchFigures(LengthMoments(8, mean, 1.0), 1.5, 0, 1.0, 1.0, False)
        seen.by_version[version] = Step(version, 0.5, {}, {}, figures)
    assert fairness([step.batch.lengths for step in seen.steps[:32]]) > 3
    assert faults(seen) == []


def test_a_few_old_tokens_with_a_large_gap_are_no_true_staleness():
    seen = evidence()
    for step in seen.by_version.values():
        step.gap.update({1: (0.05, 0.5, 90), 4: (0.5, 1.0, 4)})
    assert faults(seen) == []
    for step in seen.by_version.values():
        step.gap[4] = (0.5, 1.0, 40)
    assert faults(seen) == ["true-staleness"]


def test_a_batch_of_which_a_few_tokens_count_is_told_with_its_ages():
    (finding,) = diagnose(evidence(ess=0.1, ess_age_0=0.9, ess_age_4=0.05))
    assert finding.fault == "few-effective-tokens"
    assert finding.evidence[1] == "by staleness: 90% from 0 on, 5% from 4 on"
    assert faults(evidence(ess=0.5, ess_age_0=0.5)) == []


def test_a_clip_that_takes_most_tokens_out_is_told():
    assert faults(evidence(silenced=0.7)) == ["silenced-tokens"]
    assert faults(evidence(silenced=0.5)) == []


KEY = re.compile(r"`((?:[a-z_]+\.)+[a-z_]+)")


@pytest.mark.parametrize("schedule", [kind for key, kind, _ in leaves(Config) if key == "schedule.kind"])
@pytest.mark.parametrize("algorithm", [kind for key, kind, _ in leaves(Config) if key == "algorithm.kind"])
def test_advice_names_only_keys_that_the_run_s_configuration_has(schedule, algorithm):
    known = {key for key, kind, _ in leaves(Config) if kind in (None, schedule, algorithm, "gym")}
    stale = evidence()
    for step in stale.by_version.values():
        step.gap[1] = (0.5, 1.0, 40)
    worlds = [
        of_batches([7, 13] * 32),
        of_batches(random_means(64), ready=24, staleness=2.5, wait_s=0.01),
        evidence((0.01,) * 4),
        evidence(groups_without_signal=1.0),
        evidence((0.3, 0.5, 0.4, 0.6)),
        evidence(gap_one_version=1e-6, gap_after_swap=0.5),
        evidence(ess=0.1),
        evidence(silenced=0.9),
        stale,
    ]
    pairs = []
    for seen in worlds:
        seen.schedule, seen.algorithm, seen.corrects = schedule, algorithm, False
        pairs += [(found.fault, advice) for found in diagnose(seen) for advice in found.advice]
    assert len({fault for fault, _ in pairs}) == len(worlds)
    named = {key for _, advice in pairs for key in KEY.findall(advice)}
    assert named and named <= known


def test_batches_that_are_all_alike_are_told():
    (finding,) = diagnose(of_batches([10.0] * 64))
    assert finding.fault == "unfair-batches" and "more alike" in finding.advice[0]


def test_batches_that_wait_for_a_busy_trainer_are_needlessly_old():
    means = random_means(64)
    seen = of_batches(means, schedule="llamarl", ready=24, staleness=2.5, wait_s=0.01)
    (finding,) = diagnose(seen)
    assert finding.fault == "needless-staleness" and "lower `schedule.lag` by one" in finding.advice[0]
    assert "3.0 batches were ready" in finding.evidence[0] and "is 2.50" in finding.evidence[0]


@pytest.mark.parametrize(
    "speedy",
    [
        {"ready": 24, "staleness": 2.5, "wait_s": 0.2},
        {"ready": 8, "staleness": 2.5, "wait_s": 0.01},
        {"ready": 24, "staleness": 0.5, "wait_s": 0.01},
        {"ready": 24, "staleness": 2.5, "wait_s": 0.0, "replayed": True},
    ],
)
def test_staleness_that_speed_needs_is_no_fault(speedy):
    assert needless_staleness(of_batches([10.0, 11.0] * 32, **speedy)) is None


def fetched(version, fetch_s, received_bytes=5_000_000):
    fields = {"source": "10.0.0.1:7", "received_bytes": received_bytes, "fetch_s": fetch_s}
    return Event("fetched", 0.0, 0.0, {"host": "far", "version": version, "digest": "d", **fields})


def missed(version):
    fields = {"host": "far", "version": version, "reason": "10.0.0.1:7 does not answer"}
    return Event("fetch_missed", 0.0, 0.0, fields)


def test_a_host_that_gets_versions_more_slowly_than_they_are_made_is_named():
    seen = of_batches(random_means(64))
    for version in range(8):
        seen(fetched(version, fetch_s=30.0))
    (finding,) = diagnose(seen)
    assert finding.fault == "host-behind"
    assert "host far takes 30 s" in finding.evidence[0] and "10.0.0.1:7" in finding.evidence[0]


def test_a_host_that_gets_nothing_is_named_with_the_reason():
    seen = of_batches(random_means(64))
    for version in (1, 2, 2, 2):
        seen(missed(version))
    (finding,) = diagnose(seen)
    assert finding.fault == "host-behind" and "does not answer" in finding.evidence[0]


def test_a_host_that_follows_is_no_fault_even_after_a_miss():
    seen = of_batches(random_means(64))
    for version in range(12):
        seen(missed(version))
        seen(fetched(version, fetch_s=0.01))
    assert faults(seen) == []


def test_long_lists_are_cut():
    assert few([7], "version") == "version 7"
    assert few(range(8), "version") == "versions 0, 1, 2, 3, 4 and 3 more"
