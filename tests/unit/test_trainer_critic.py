"""A critic: advantages by GAE, its loss, its head and where that is kept."""

from __future__ import annotations

import algorithm_reference
import numpy as np
import pytest
import torch
from test_algorithms_presets import MAX_TOKENS, large_batch, tables
from trainer_doubles import make_batch, make_trainer, save_checkpoint, tiny_model, weights_of

from millrace.algorithms import ComparedGroup
from millrace.algorithms.advantages import value_advantages
from millrace.config.tables.algorithms import PolicyGradient
from millrace.core.errors import TrainingError
from millrace.trainer.files.checkpoint import load_checkpoint
from millrace.trainer.model import named_weights
from millrace.trainer.worker import not_finite_trajectories

NAN = float("nan")


def group_of(values, rewards):
    masks = [~np.isnan(v) for v in values]
    return ComparedGroup.of(rewards, masks, values=values)


def test_advantages_by_hand():
    values = [np.array([0.5, NAN, 0.2]), np.array([0.25])]
    first, second = value_advantages(group_of(values, [1.0, 0.0]), discount=0.9, gae_lambda=0.5)
    # delta = 0.9 x 0.2 - 0.5 = -0.32, then 1 - 0.2 = 0.8;  A = -0.32 + 0.45 x 0.8, then 0.8
    assert first == pytest.approx([0.04, 0.0, 0.8])
    assert second == pytest.approx([-0.25])


def test_to_the_end_an_advantage_is_the_reward_less_the_value():
    values = [np.array([0.3, -0.2, 0.9]), np.array([0.1, 0.4])]
    found = value_advantages(group_of(values, [2.0, 1.0]), discount=1.0, gae_lambda=1.0)
    for reward, value, advantages in zip([2.0, 1.0], values, found, strict=True):
        assert advantages == pytest.approx(reward - value)


@pytest.mark.parametrize("budget", [10_000, 60, 1])
def test_gradients_of_log_probs_and_values_are_those_of_the_reference(budget):
    batch = large_batch()
    old, pi = tables(batch)
    random = np.random.default_rng(3)
    before = random.normal(0, 0.5, old.size)
    now = before + random.normal(0, 0.3, old.size)
    trainer = make_trainer(
        PolicyGradient(kind="ppo"), dtype=torch.float64, max_tokens=MAX_TOKENS, epochs=2, token_budget=budget
    )
    seen = torch.tensor(np.stack([old, np.zeros(old.size), before]))
    trainer._forward = lambda row, reference=False: tuple(seen[:, row.flat_N])
    prepared = trainer._prepared(batch, 1)
    seen = torch.tensor(np.stack([pi, np.zeros(pi.size), now]), requires_grad=True)
    trainer._accumulate(prepared, 0, 0.5)
    due = algorithm_reference.gradient("ppo", batch, old, pi, MAX_TOKENS, before)
    np.testing.assert_allclose(seen.grad[0].numpy(), due, rtol=1e-9, atol=1e-12)
    due_values = np.zeros(old.size)
    first, tokens = 0, sum(int(np.sum(s.mask)) for g in batch.groups for s in g.sequences)
    for s in (s for g in batch.groups for s in g.sequences):
        at = first + np.flatnonzero(s.mask)
        first += len(s.mask)
        returns = algorithm_reference.gae(before[at], s.reward) + before[at]
        due_values[at] = algorithm_reference.value_gradient(now[at], before[at], returns) / tokens
    assert np.abs(due_values).max() > 1e-4
    np.testing.assert_allclose(seen.grad[2].numpy(), due_values, rtol=1e-9, atol=1e-12)


def with_head(**changes):
    """A trainer whose critic says something."""
    trainer = make_trainer(PolicyGradient(kind="ppo", value_trunk=0.5), **changes)
    with torch.no_grad():
        trainer.value_head.weight.normal_(std=10.0, generator=torch.Generator().manual_seed(1))
    return trainer


def gradients(trainer, batch):
    trainer.accumulate(batch)
    every = [*trainer.model.parameters(), *trainer.value_head.parameters()]
    return torch.cat([parameter.grad.flatten() for parameter in every])


def test_packing_changes_no_gradient_of_model_and_head():
    due = gradients(with_head(token_budget=10_000), make_batch())
    for budget in (60, 1):
        found = gradients(with_head(token_budget=budget), make_batch())
        assert (found - due).norm() < 1e-5 * due.norm()


def test_the_head_alone_learns_unless_its_gradient_goes_on():
    def of_model(trunk):
        trainer = make_trainer(PolicyGradient(kind="ppo", value_trunk=trunk))
        with torch.no_grad():
            trainer.value_head.weight.fill_(3.0)
        trainer.accumulate(make_batch())
        return torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])

    apart, half, whole = (of_model(trunk) for trunk in (0.0, 0.5, 1.0))
    assert (apart - half).norm() > 1e-3 * apart.norm()
    assert torch.allclose(half - apart, (whole - apart) / 2, atol=1e-5)


def test_values_come_to_explain_returns(tmp_path):
    trainer = make_trainer(PolicyGradient(kind="ppo", value_lr=0.1))
    metrics = [trainer.step(make_batch(version), rejected_dir=tmp_path).metrics for version in range(12)]
    assert metrics[0]["value_mean"] == metrics[0]["value_explained"] == 0.0
    assert metrics[-1]["value_mean"] == pytest.approx(1.4, abs=0.8)


def test_a_resumed_run_goes_on_with_its_critic_bit_for_bit(tmp_path):
    def steps(trainer, first, last):
        for version in range(first, last):
            trainer.step(make_batch(version), rejected_dir=tmp_path)
        return trainer

    straight = steps(make_trainer(PolicyGradient(kind="ppo")), 0, 5)
    path = save_checkpoint(steps(make_trainer(PolicyGradient(kind="ppo")), 0, 3), tmp_path)
    resumed = make_trainer(PolicyGradient(kind="ppo"), model=tiny_model(seed=9))
    load_checkpoint(resumed, path)
    steps(resumed, 3, 5)
    for one, other in zip(weights_of(straight), weights_of(resumed), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(straight.value_head.weight, resumed.value_head.weight)
    assert straight.value_head.weight.abs().max() > 0


def test_a_checkpoint_of_another_algorithm_is_gone_on_from(tmp_path):
    with_critic, without = make_trainer(PolicyGradient(kind="ppo")), make_trainer()
    for trainer in (with_critic, without):
        trainer.step(make_batch(), rejected_dir=tmp_path)
    load_checkpoint(without, save_checkpoint(with_critic, tmp_path / "one"))
    fresh = make_trainer(PolicyGradient(kind="ppo"))
    plain = make_trainer()
    plain.step(make_batch(), rejected_dir=tmp_path)
    load_checkpoint(fresh, save_checkpoint(plain, tmp_path / "other"))
    assert fresh.version == without.version == 1
    assert not fresh.value_head.weight.any()


def test_no_replica_gets_the_critic():
    trainer = make_trainer(PolicyGradient(kind="ppo"))
    assert list(named_weights(trainer.model)) == list(named_weights(make_trainer().model))


def test_a_rejected_batch_leaves_the_critic_as_it_was(tmp_path):
    trainer = with_head()
    before = trainer.value_head.weight.clone()
    batch = make_batch()
    with torch.no_grad():
        trainer.value_head.bias.fill_(float("nan"))
    with pytest.raises(TrainingError):
        trainer.step(batch, rejected_dir=tmp_path)
    assert len(not_finite_trajectories(trainer, batch)) == 12
    assert torch.equal(trainer.value_head.weight, before)
    assert all(p.grad is None for p in trainer.value_head.parameters())
