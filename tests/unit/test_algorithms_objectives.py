from __future__ import annotations

import importlib.util
import math

import numpy as np
import pytest
import torch

from millrace.algorithms import Group, TokenLogprobs, build
from millrace.algorithms.aipo import aipo_objective
from millrace.algorithms.grpo import grpo_objective
from millrace.algorithms.kl import kl_k3
from millrace.config.training import AIPO, GRPO, DrGRPO

NAMESPACES = ["numpy", "torch", *(["jax.numpy"] if importlib.util.find_spec("jax") else [])]


def policies(current, behavior=None, proximal=None, reference=None, array=np.asarray):
    """From probabilities to log-probs; what is left out equals `current`."""

    def log(probability):
        return array([math.log(current if probability is None else probability)])

    return TokenLogprobs(log(None), log(None), log(behavior), log(proximal), log(reference))


def grpo(logprobs, advantage, correction=None, kl=0.0):
    loss = grpo_objective(
        np, logprobs, np.asarray([advantage]), clip_low=0.2, clip_high=0.3, correction=correction, kl=kl
    )
    return loss.item()


@pytest.mark.parametrize(
    ("current", "advantage", "loss"),
    [
        (0.50, 1.0, -1.0),  # u = 1
        (0.75, 1.0, -1.3),  # u = 1.5 is clipped to 1.3: no reason to go further up
        (0.75, -1.0, 1.5),  # u = 1.5, pessimistic: not clipped
        (0.25, 1.0, -0.5),  # u = 0.5, pessimistic: not clipped
        (0.25, -1.0, 0.8),  # u = 0.5 is clipped to 0.8: no reason to go further down
    ],
)
def test_the_clip_worked_by_hand(current, advantage, loss):
    assert grpo(policies(current, behavior=0.5, proximal=0.5), advantage) == pytest.approx(loss)


@pytest.mark.parametrize(("correction", "loss"), [(None, -1.0), (3.0, -2.0), (1.5, -1.5)])
def test_the_importance_weight_is_proximal_over_behavior_and_truncated(correction, loss):
    # 0.5 / 0.25 = 2
    assert grpo(policies(0.5, behavior=0.25), 1.0, correction) == pytest.approx(loss)


def test_k3_worked_by_hand():
    # r = 0.25 / 0.5: 0.5 - log 0.5 - 1
    assert kl_k3(np, np.log(0.5), np.log(0.25)) == pytest.approx(0.1931471805599453)
    assert kl_k3(np, np.log(0.5), np.log(0.5)) == 0.0
    assert grpo(policies(0.5, reference=0.25), 1.0, kl=0.1) == pytest.approx(-1.0 + 0.01931471805599453)


@pytest.mark.parametrize(("rho", "weight"), [(4.0, 4.0), (10.0, 5.0)])
def test_aipo_worked_by_hand(rho, weight):
    # pi / mu = 0.5 / 0.1 = 5
    loss = aipo_objective(np, policies(0.5, behavior=0.1), np.asarray([2.0]), rho=rho)
    assert loss.item() == pytest.approx(-weight * 2.0 * math.log(0.5))


def gradient(objective, advantage, **probabilities):
    logprobs = policies(**probabilities, array=lambda values: torch.tensor(values, dtype=torch.float64))
    logprobs.current_N.requires_grad_()
    objective(torch, logprobs, torch.tensor([advantage], dtype=torch.float64)).sum().backward()
    return logprobs.current_N.grad.item()


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize(("behavior", "weight"), [(0.1, 4.0), (0.25, 2.0), (1.0, 0.5)])
def test_the_gradient_of_aipo_is_the_weighted_score_for_both_signs(advantage, behavior, weight):
    objective = build(AIPO(rho=4.0)).objective
    assert gradient(objective, advantage, current=0.5, behavior=behavior) == pytest.approx(
        -weight * advantage
    )


@pytest.mark.parametrize("config", [GRPO(), DrGRPO()])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize(("behavior", "weight"), [(0.1, 2.0), (0.4, 1.25), (1.0, 0.5)])
def test_with_one_step_per_batch_nothing_is_clipped_but_the_weight(config, advantage, behavior, weight):
    slope = gradient(build(config).objective, advantage, current=0.5, behavior=behavior)
    assert slope == pytest.approx(-weight * advantage)


def test_a_clipped_token_has_no_gradient():
    objective = build(GRPO(correction=None)).objective
    assert gradient(objective, 1.0, current=0.75, proximal=0.5) == 0.0
    assert gradient(objective, -1.0, current=0.25, proximal=0.5) == 0.0


def test_k3_pulls_towards_the_reference():
    objective = build(GRPO(kl=1.0)).objective
    # d k3 / d log pi = 1 - pi_ref / pi
    assert gradient(objective, 0.0, current=0.5, reference=0.25) == pytest.approx(0.5)
    assert gradient(objective, 0.0, current=0.5, reference=0.5) == 0.0


@pytest.mark.parametrize("name", NAMESPACES)
@pytest.mark.parametrize("config", [GRPO(kl=0.1), DrGRPO(), AIPO()])
def test_an_objective_means_the_same_in_every_namespace(name, config):
    xp = importlib.import_module(name)
    random = np.random.default_rng(0)
    values = [random.uniform(-3, 0, 8).astype(np.float32) for _ in range(4)]
    advantages = random.normal(size=8).astype(np.float32)

    def loss(namespace):
        array = namespace.asarray
        current, *rest = (array(value) for value in values)
        return build(config).objective(namespace, TokenLogprobs(current, current, *rest), array(advantages))

    np.testing.assert_allclose(np.asarray(loss(xp)), loss(np), rtol=1e-5)


@pytest.mark.parametrize("difference", [90.0, 1e4, -1e4])
def test_the_kl_estimate_stays_finite_however_far_the_policies_are_apart(difference):
    current = torch.tensor([-1.0], requires_grad=True)
    estimate = kl_k3(torch, current, current.detach() + difference)
    estimate.backward()
    assert 0 < estimate.item() < 5e8
    assert current.grad.item() == 0.0


def test_only_a_kl_penalty_needs_a_reference():
    assert build(GRPO(kl=0.1)).needs_reference
    assert not any(build(config).needs_reference for config in (GRPO(), DrGRPO(), AIPO()))


def test_dr_grpo_neither_scales_by_the_deviation_nor_by_length():
    algorithm = build(DrGRPO())
    assert algorithm.advantages(Group.of([4, 0, 0, 0])).tolist() == [3, -1, -1, -1]
    assert algorithm.normalize == "max_tokens"
