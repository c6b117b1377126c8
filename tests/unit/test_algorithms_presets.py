"""Every preset gives the gradient of its plain reference, however the batch is packed."""

from __future__ import annotations

import dataclasses
from functools import partial

import algorithm_reference
import msgspec
import numpy as np
import pytest
import torch
from tests.long import few
from trainer_doubles import make_batch, make_trainer

from millrace.algorithms import ComparedGroup
from millrace.config.tables.algorithms import PRESETS as KINDS
from millrace.config.tables.algorithms import PolicyGradient
from millrace.core.completion.columns import TokenColumns
from millrace.core.types import Batch

PRESETS = {kind: partial(PolicyGradient, kind=kind) for kind in KINDS}
MAX_TOKENS = 20


def large_batch(seed=0):
    """Groups of 6, with rewards of both signs, and tokens that were likely and unlikely."""
    batch = make_batch(version=1, seed=seed, groups=4, group_size=6)
    random = np.random.default_rng(seed)
    groups = []
    for group in batch.groups:
        sequences = []
        for s in group.sequences:
            logprobs = random.uniform(-3, -0.1, len(s.columns)).tolist()
            columns = TokenColumns.of(s.columns.tokens, logprobs, s.columns.versions())
            metrics = {f"turn_{k}": v for k, v in enumerate(random.normal(size=6), 1) if k != 3}
            made = {"reward": s.reward / 2 - 0.5, "columns": columns, "metrics": metrics}
            sequences.append(msgspec.structs.replace(s, **made))
        groups.append(msgspec.structs.replace(group, sequences=sequences))
    return Batch(1, groups)


def tables(batch, seed=0):
    """Log-probs of every completion token at the batch's beginning, and now."""
    random = np.random.default_rng(seed)
    mu = np.concatenate([np.asarray(s.columns.logprobs, float) for g in batch.groups for s in g.sequences])
    old = np.minimum(mu + random.normal(0, 0.9, mu.size), -0.05)
    return old, np.minimum(old + random.normal(0, 0.3, mu.size), -0.05)


def found_gradient(config, batch, old, pi, **changes):
    """By the trainer, with tables in place of a model. Halfway through the batch's optimizer steps."""
    table = torch.tensor(old)
    trainer = make_trainer(config, dtype=torch.float64, max_tokens=MAX_TOKENS, epochs=2, **changes)
    trainer._forward = lambda row, reference=False: (table[row.flat_N], torch.zeros(len(row.flat_N)))
    prepared = trainer._prepared(batch, 1)
    table = torch.tensor(pi, requires_grad=True)
    trainer._accumulate(prepared, 0, 0.5)
    return table.grad.numpy()


@pytest.mark.parametrize("kind", PRESETS)
@pytest.mark.parametrize("seed", few([0, 1]))
def test_a_preset_gives_the_gradient_of_its_reference(kind, seed):
    batch = large_batch(seed)
    old, pi = tables(batch, seed)
    due = algorithm_reference.gradient(kind, batch, old, pi, MAX_TOKENS)
    assert np.abs(due).max() > 1e-4
    for budget in (10_000, 60, 1):
        found = found_gradient(PRESETS[kind](), batch, old, pi, token_budget=budget)
        np.testing.assert_allclose(found, due, rtol=1e-9, atol=1e-12)


def test_every_preset_is_another_algorithm():
    batch = large_batch()
    old, pi = tables(batch)
    gradients = {kind: found_gradient(PRESETS[kind](), batch, old, pi) for kind in PRESETS}
    same = {
        (one, other)
        for one, ours in gradients.items()
        for other, theirs in gradients.items()
        if one < other and np.allclose(ours, theirs, rtol=1e-6, atol=1e-12)
    }
    assert same == set()


def test_the_preset_of_a_kind_and_its_keys_written_out_are_one():
    for kind, preset in PRESETS.items():
        written = preset().model_dump(exclude={"kind"})
        assert PRESETS["grpo"](**written).model_dump(exclude={"kind"}) == written, kind


def test_truncated_trajectories_may_be_masked_and_stay_in_the_baseline():
    batch = large_batch()
    old, pi = tables(batch)
    cut_C = np.concatenate([np.full(len(s.columns), s.truncated) for g in batch.groups for s in g.sequences])
    whole = found_gradient(PRESETS["dr_grpo"](), batch, old, pi)
    masked = found_gradient(PRESETS["dr_grpo"](truncated="mask"), batch, old, pi)
    np.testing.assert_allclose(masked, np.where(cut_C, 0.0, whole))


def test_a_step_in_which_nothing_is_trained_is_a_version_all_the_same(tmp_path):
    batch = make_batch()
    replace = msgspec.structs.replace
    groups = [replace(g, sequences=[replace(s, reward=-1.0) for s in g.sequences]) for g in batch.groups]
    trainer = make_trainer(PRESETS["raft"]())
    result = trainer.step(Batch(0, groups), rejected_dir=tmp_path)
    assert (result.version, trainer.version) == (1, 1)
    assert (result.trained_tokens, result.metrics["updates"], result.logprob_gap) == (0, 0.0, {})


def test_a_penalty_of_the_reward_is_taken_off_before_the_comparison():
    batch = large_batch()
    old, _ = tables(batch)
    ref = np.minimum(old + np.random.default_rng(5).normal(0, 0.4, old.size), -0.05)
    config = PRESETS["dr_grpo"](kl=0.1, kl_in="reward", kl_estimator="k1")
    prepared = penalised(config, old, ref)._prepared(batch, 1)
    first = 0
    for group in batch.groups:
        rewards, begins = [], []
        for s in group.sequences:
            at = first + np.flatnonzero(s.mask)
            rewards.append(s.reward - 0.1 * (old[at] - ref[at]).sum())
            begins.append((first, first := first + len(s.mask)))
        for (begin, end), reward in zip(begins, rewards, strict=True):
            due = reward - np.mean(rewards)
            np.testing.assert_allclose(prepared.flat.advantages_C[begin:end], due, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("raft", {}),
        ("gfpo", {"select": "efficient", "keep": 2, "scale": "none"}),
        ("dr_grpo", {"truncated": "mask"}),
    ],
)
def test_what_is_selected_and_what_is_compared_are_the_same_rewards(kind, changes):
    """Those less the penalty, of every trajectory: also of one that its reward alone would leave out."""
    batch = large_batch()
    old, _ = tables(batch)
    ref = np.minimum(old + np.random.default_rng(5).normal(0, 0.9, old.size), -0.05)
    config = PRESETS[kind](kl=0.3, kl_in="reward", kl_estimator="k1", **changes)
    trainer = penalised(config, old, ref)
    flat = trainer._prepared(batch, 2).flat
    first, selections = 0, set()
    for group in batch.groups:
        masks, rewards, begins = [s.mask for s in group.sequences], [], []
        for s in group.sequences:
            at = first + np.flatnonzero(s.mask)
            rewards.append(s.reward - 0.3 * (old[at] - ref[at]).sum())
            begins.append((first, first := first + len(s.mask)))
        cut = [s.truncated for s in group.sequences]
        due, raw = (ComparedGroup.of(r, masks, cut) for r in (rewards, [s.reward for s in group.sequences]))
        trains, compared = trainer.algorithm.trained(due), trainer.algorithm.advantages(due)
        selections.add((trains == trainer.algorithm.trained(raw)).all())
        for (begin, end), mask, trained, advantage in zip(begins, masks, trains, compared, strict=True):
            assert ((flat.weights_C[begin:end] > 0) == (np.asarray(mask) & trained)).all()
            np.testing.assert_allclose(flat.advantages_C[begin:end], advantage, rtol=1e-9, atol=1e-12)
    assert kind == "dr_grpo" or False in selections


def penalised(config, old, ref):
    """A trainer with tables in place of its model and its reference."""
    trainer = make_trainer(config, dtype=torch.float64, max_tokens=MAX_TOKENS, epochs=2, reference=True)
    trainer._forward = lambda row, reference=False: (
        torch.tensor(ref if reference else old)[row.flat_N],
        torch.zeros(len(row.flat_N)),
    )
    return trainer


def test_what_is_settled_for_a_batch_does_not_depend_on_its_parts():
    batch = large_batch()
    old, _ = tables(batch)
    weights = []
    for minibatches in (1, 4):
        trainer = make_trainer(PRESETS["m2po"](), dtype=torch.float64, epochs=2)
        trainer._forward = lambda row, reference=False: (
            torch.tensor(old)[row.flat_N],
            torch.zeros(len(row.flat_N)),
        )
        weights.append(trainer._prepared(batch, minibatches).flat.weights_C > 0)
    assert np.array_equal(*weights)
    assert not weights[0].all()


def test_an_own_algorithm_is_made_of_the_same_parts():
    config = PRESETS["cispo"]()
    made = dataclasses.replace(make_trainer(config).algorithm, normalize="sequence")
    batch = large_batch()
    old, pi = tables(batch)
    np.testing.assert_allclose(
        found_gradient(made, batch, old, pi),
        found_gradient(PRESETS["cispo"](normalize="sequence"), batch, old, pi),
    )
