from __future__ import annotations

import importlib.util
import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from millrace.algorithms import ComparedGroup, TokenLogprobs, build
from millrace.algorithms.corrections import within_second_moment
from millrace.algorithms.logprobs import DenseSequences, kl
from millrace.config.tables.algorithms import PRESETS, PolicyGradient

NAMESPACES = ["numpy", "torch", *(["jax.numpy"] if importlib.util.find_spec("jax") else [])]


def policies(current, behavior=None, proximal=None, reference=None, array=np.asarray, xp=np):
    """From probabilities to log-probs; what is left out equals `current`. Lists are one sequence."""
    now = np.atleast_1d(current)

    def log(probabilities):
        return array(np.log(np.broadcast_to(now if probabilities is None else probabilities, now.shape)))

    sequences = DenseSequences.of(xp, np.zeros(now.size), log(None))
    entropies = array(np.full(now.size, 1.5))
    return TokenLogprobs(
        log(None), log(None), log(behavior), log(proximal), log(reference), sequences, entropies
    )


def loss(config, logprobs, advantage):
    found = build(config).objective(np, logprobs, np.full(logprobs.current_N.shape, advantage))
    return found.tolist() if found.size > 1 else found.item()


def slope(config, advantage, **probabilities):
    """d loss / d log pi of each token."""
    logprobs = policies(**probabilities, array=torch.tensor, xp=torch)
    logprobs.current_N.requires_grad_()
    advantages = torch.full(logprobs.current_N.shape, float(advantage), dtype=torch.float64)
    build(config).objective(torch, logprobs, advantages).sum().backward()
    found = logprobs.current_N.grad.tolist()
    return found if len(found) > 1 else found[0]


CLIP = PolicyGradient(clip_low=0.2, clip_high=0.3, correction=None)


@pytest.mark.parametrize(
    ("current", "advantage", "expected"),
    [
        (0.50, 1.0, -1.0),  # u = 1
        (0.75, 1.0, -1.3),  # u = 1.5 is clipped to 1.3: no reason to go further up
        (0.75, -1.0, 1.5),  # u = 1.5, pessimistic: not clipped
        (0.25, 1.0, -0.5),  # u = 0.5, pessimistic: not clipped
        (0.25, -1.0, 0.8),  # u = 0.5 is clipped to 0.8: no reason to go further down
    ],
)
def test_the_clip_worked_by_hand(current, advantage, expected):
    assert loss(CLIP, policies(current, proximal=0.5), advantage) == pytest.approx(expected)


def test_the_second_bound_holds_a_bad_token_whose_ratio_grew():
    config = PolicyGradient(correction=None, clip_dual=4.0)
    assert loss(config, policies(0.6, proximal=0.1), -1.0) == pytest.approx(4.0)  # u = 6
    assert slope(config, -1.0, current=0.6, proximal=0.1) == 0.0
    assert loss(config, policies(0.3, proximal=0.1), -1.0) == pytest.approx(3.0)


@pytest.mark.parametrize(("correction", "expected"), [(None, -1.0), (3.0, -2.0), (1.5, -1.5)])
def test_the_importance_weight_is_proximal_over_behavior_and_truncated(correction, expected):
    # 0.5 / 0.25 = 2
    config = PolicyGradient(correction=correction)
    assert loss(config, policies(0.5, behavior=0.25), 1.0) == pytest.approx(expected)


@pytest.mark.parametrize(("behavior", "weight"), [(0.25, 2.0), (0.05, 0.0), (1.0, 0.5)])
def test_weights_outside_their_bounds_may_be_dropped(behavior, weight):
    # 2 is within [0.5, 5]; 10 is not; 0.5 is
    assert loss(PolicyGradient(kind="icepop"), policies(0.5, behavior=behavior), 1.0) == pytest.approx(
        -weight
    )


def test_a_sequence_is_corrected_by_the_product_of_its_ratios():
    # 2 x 0.8 x 1 = 1.6
    logprobs = policies([0.5, 0.4, 0.3], behavior=[0.25, 0.5, 0.3])
    assert loss(PolicyGradient(correction_of="sequence"), logprobs, 1.0) == pytest.approx([-1.6] * 3)


def test_a_sequence_s_ratio_is_the_geometric_mean_and_clips_the_whole_sequence():
    # (2 x 0.5 x 8)^(1/3) = 2
    config = PolicyGradient(kind="gspo", clip_low=0.5, clip_high=0.5, correction=None)
    current, proximal = [0.4, 0.1, 0.8], [0.2, 0.2, 0.1]
    assert loss(config, policies(current, proximal=proximal), -1.0) == pytest.approx([2.0] * 3)
    assert slope(config, -1.0, current=current, proximal=proximal) == pytest.approx([2.0] * 3)
    assert slope(config, 1.0, current=current, proximal=proximal) == [0.0] * 3


def test_a_bad_sequence_that_the_policy_left_is_masked_and_a_good_one_is_not():
    # mean log(mu / pi) = (log 2 + log 4) / 2 = 1.04
    left = {"current": [0.2, 0.1], "behavior": [0.4, 0.4]}
    assert slope(PolicyGradient(kind="deepseek_v32", drift=1.0), -1.0, **left) == [0.0, 0.0]
    assert slope(PolicyGradient(kind="deepseek_v32", drift=1.0), 1.0, **left) == pytest.approx([-0.5, -0.25])
    assert slope(PolicyGradient(kind="deepseek_v32", drift=1.1, clip_low=0.9), -1.0, **left) == pytest.approx(
        [0.5, 0.25]
    )


def test_a_soft_gate_worked_by_hand():
    # u = 2, tau = 1: 4 sigmoid(1) (1 - sigmoid(1)) u = 4 x 0.731059 x 0.268941 x 2
    assert slope(
        PolicyGradient(kind="sapo", correction=None), 1.0, current=0.5, proximal=0.25
    ) == pytest.approx(-1.5728955)
    assert slope(PolicyGradient(kind="sapo", correction=None), -3.0, current=0.5) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("clip", "current", "behavior", "advantage", "expected"),
    [
        ("tv", 0.75, 0.5, 1.0, 0.0),  # risen by 0.25
        ("tv", 0.65, 0.5, 1.0, -1.3),  # by 0.15
        ("tv", 0.75, 0.5, -1.0, 1.5),  # pushed back
        ("tv", 0.02, 0.001, 1.0, -10.0),  # 20 times as likely, and hardly more: the cap alone
        ("kl", 0.75, 0.5, 1.0, 0.0),  # 0.5 log(0.5 / 0.75) + 0.5 log(0.5 / 0.25) = 0.144
        ("kl", 0.52, 0.5, 1.0, -1.04),  # 0.0008
    ],
)
def test_tokens_are_left_out_by_how_far_their_probability_moved(clip, current, behavior, advantage, expected):
    far = 0.2 if clip == "tv" else 0.05
    config = PolicyGradient(kind="bypass", clip=clip, rho=10.0, clip_low=far, clip_high=far)
    assert slope(config, advantage, current=current, behavior=behavior) == pytest.approx(expected)


def test_the_largest_moments_are_left_out_until_the_mean_of_the_capped_is_small():
    # squares 0.01, 0.04, 0.09, 1: capped at each of them the means are 0.01, 0.0325, 0.0575, 0.285
    ratios, pushed = np.array([0.1, -1.0, 0.3, -0.2]), np.array([1.0, -2.0, 1.0, -1.0])

    def kept(most, advantages=pushed):
        return within_second_moment(ratios, np.zeros(4), advantages, most=most).tolist()

    assert kept(0.04) == [True, False, False, True]
    assert kept(0.06) == [True, False, True, True]
    assert kept(0.286) == [True] * 4
    assert kept(0.009) == [False] * 4


def test_what_moved_against_its_advantage_is_never_left_out():
    ratios, advantages = np.array([0.1, -1.0, 0.3, -0.2]), np.array([1.0, 2.0, -1.0, 0.0])
    assert within_second_moment(ratios, np.zeros(4), advantages, most=0.001).tolist() == [False] + [True] * 3
    assert within_second_moment(np.zeros(3), np.zeros(3), np.ones(3), most=0.04).all()


def test_estimates_of_kl_worked_by_hand():
    # d = log(0.25 / 0.5) = -0.6931: k1 0.6931, k2 0.2402, k3 0.5 + 0.6931 - 1
    found = {name: kl(np, np.log(0.5), np.log(0.25), estimator=name) for name in ("k1", "k2", "k3")}
    expected = {"k1": 0.6931471805599453, "k2": 0.2402265069591007, "k3": 0.1931471805599453}
    assert found == pytest.approx(expected)
    assert [kl(np, np.log(0.5), np.log(0.5), estimator=name) for name in found] == [0.0] * 3
    logprobs = policies(0.5, reference=0.25)
    assert loss(PolicyGradient(kl=0.1), logprobs, 1.0) == pytest.approx(-1.0 + 0.1 * expected["k3"])
    assert loss(PolicyGradient(kl=0.1, kl_estimator="k2"), logprobs, 1.0) == pytest.approx(
        -1.0 + 0.1 * expected["k2"]
    )


def test_a_bonus_of_entropy_lowers_the_loss():
    assert loss(PolicyGradient(entropy=0.1), policies(0.5), 1.0) == pytest.approx(-1.0 - 0.15)


@pytest.mark.parametrize(("rho", "weight"), [(4.0, 4.0), (10.0, 5.0)])
def test_aipo_worked_by_hand(rho, weight):
    # pi / mu = 0.5 / 0.1 = 5
    found = loss(PolicyGradient(kind="aipo", rho=rho), policies(0.5, behavior=0.1), 2.0)
    assert found == pytest.approx(-weight * 2.0 * math.log(0.5))


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize(("behavior", "weight"), [(0.1, 4.0), (0.25, 2.0), (1.0, 0.5)])
def test_the_gradient_of_aipo_is_the_weighted_score_for_both_signs(advantage, behavior, weight):
    assert slope(
        PolicyGradient(kind="aipo", rho=4.0), advantage, current=0.5, behavior=behavior
    ) == pytest.approx(-weight * advantage)


@pytest.mark.parametrize(
    "config", [PolicyGradient(), PolicyGradient(kind="dr_grpo"), PolicyGradient(kind="reinforce")]
)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize(("behavior", "weight"), [(0.1, 2.0), (0.4, 1.25), (1.0, 0.5)])
def test_with_one_step_per_batch_nothing_is_clipped_but_the_weight(config, advantage, behavior, weight):
    assert slope(config, advantage, current=0.5, behavior=behavior) == pytest.approx(-weight * advantage)


def test_a_clipped_token_has_no_gradient():
    assert slope(PolicyGradient(correction=None), 1.0, current=0.75, proximal=0.5) == 0.0
    assert slope(PolicyGradient(correction=None), -1.0, current=0.25, proximal=0.5) == 0.0


def test_penalties_pull_towards_the_reference():
    # d k3 / d log pi = 1 - pi_ref / pi;   d k2 / d log pi = log(pi / pi_ref)
    assert slope(PolicyGradient(kl=1.0), 0.0, current=0.5, reference=0.25) == pytest.approx(0.5)
    assert slope(
        PolicyGradient(kl=1.0, kl_estimator="k2"), 0.0, current=0.5, reference=0.25
    ) == pytest.approx(math.log(2))
    assert slope(PolicyGradient(kl=1.0), 0.0, current=0.5, reference=0.5) == 0.0


@pytest.mark.parametrize("name", NAMESPACES)
@pytest.mark.parametrize("preset", PRESETS)
def test_an_objective_means_the_same_in_every_namespace(name, preset):
    xp = importlib.import_module(name)
    random = np.random.default_rng(0)
    values = [random.uniform(-3, -0.1, 8).astype(np.float32) for _ in range(5)]
    advantages = random.normal(size=8).astype(np.float32)
    config = PolicyGradient(kind=preset, kl=0.1, kl_estimator="k3", entropy=0.1)

    def found(namespace):
        array = namespace.asarray
        current, *rest, entropies = (array(value) for value in values)
        sequences = DenseSequences.of(namespace, [0, 0, 0, 1, 1, 2, 2, 2], current)
        logprobs = TokenLogprobs(current, current, *rest, sequences, entropies)
        return build(config).objective(namespace, logprobs, array(advantages))

    np.testing.assert_allclose(np.asarray(found(xp)), found(np), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("difference", [90.0, 1e4, -1e4])
def test_the_kl_estimate_stays_finite_however_far_the_policies_are_apart(difference):
    current = torch.tensor([-1.0], requires_grad=True)
    estimate = kl(torch, current, current.detach() + difference, estimator="k3")
    estimate.backward()
    assert 0 < estimate.item() < 5e8
    assert current.grad.item() == 0.0


def test_only_a_kl_penalty_needs_a_reference():
    assert build(PolicyGradient(kl=0.1)).needs_reference
    assert not any(
        build(config).needs_reference
        for config in (PolicyGradient(), PolicyGradient(kind="dr_grpo"), PolicyGradient(kind="aipo"))
    )


def test_dr_grpo_neither_scales_by_the_deviation_nor_by_length():
    algorithm = build(PolicyGradient(kind="dr_grpo"))
    assert algorithm.advantages(ComparedGroup.of([4, 0, 0, 0])).tolist() == [3, -1, -1, -1]
    assert algorithm.normalize == "max_tokens"


@pytest.mark.parametrize(
    ("preset", "changes", "key"),
    [
        ("aipo", {"correction": 2.0}, "algorithm.correction"),
        ("grpo", {"correction": None, "correction_low": 0.5}, "algorithm.correction_low"),
        ("grpo", {"baseline": "none"}, "algorithm.scale"),
        ("grpo", {"keep": 3}, "algorithm.keep"),
        ("gfpo", {"keep": None}, "algorithm.keep"),
        ("sapo", {"clip_dual": 4.0}, "algorithm.clip_dual"),
        ("grpo", {"clip_dual": 1.1}, "algorithm.clip_dual"),
        ("gspo", {"clip": "tv"}, "algorithm.ratio"),
        ("grpo", {"kl": 0.1, "kl_estimator": "k1"}, "algorithm.kl_estimator"),
        ("dapo", {"teacher": "t"}, "algorithm.resample"),
        ("grpo", {"teacher": "t", "second_moment": 0.04}, "algorithm.second_moment"),
        ("dapo", {"baseline": "value", "scale": "batch"}, "algorithm.resample"),
    ],
)
def test_keys_that_mean_nothing_together_are_refused_by_name(preset, changes, key):
    with pytest.raises(ValidationError, match=rf"`{key}` \("):
        PolicyGradient(kind=preset, **changes)
