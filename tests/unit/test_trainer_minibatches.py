"""Several optimizer steps for one batch: one anchor, one version, all or nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from trainer_doubles import (
    make_batch,
    make_trainer,
    save_checkpoint,
    sequence_logprobs,
    tiny_model,
    weights_of,
)

from millrace.algorithms import build
from millrace.algorithms.corrections import interpolated
from millrace.config.tables.algorithms import PolicyGradient
from millrace.config.tables.training import Optimizer
from millrace.core.errors import TrainingError, WeightsError
from millrace.core.types import Batch
from millrace.trainer.batch.flat_batch import flatten
from millrace.trainer.files.checkpoint import load_checkpoint

LR = Optimizer(lr=3e-3, grad_clip=None, eps=1e-5)  # so large an eps that rounding is not divided by itself


def stepped(tmp_path, algorithm=None, batch=None, **changes):
    trainer = make_trainer(algorithm, optimizer=LR, **changes)
    result = trainer.step(batch or make_batch(groups=4), rejected_dir=tmp_path)
    assert trainer.version == result.version == 1
    return weights_of(trainer), result


def apart(ones, others):
    return max((one - other).abs().max().item() for one, other in zip(ones, others, strict=True))


def logprobs_of(model, batch):
    return [
        sequence_logprobs(model, group.prompt, s.columns.tokens.tolist())
        for group in batch.groups
        for s in group.sequences
    ]


def plain_loss(batch, current, proximal):
    """GRPO of one part of a batch, written out."""
    rewards = np.concatenate(
        [
            (lambda r: (r - r.mean()) / (r.std() + 1e-6))(np.array([s.reward for s in group.sequences]))
            for group in batch.groups
        ]
    )
    sequences = [s for group in batch.groups for s in group.sequences]
    total, count = torch.zeros(()), 0
    for a, s, now, anchor in zip(rewards, sequences, current, proximal, strict=True):
        u, mask = (now - anchor).exp(), torch.tensor(s.mask)
        w = (anchor - torch.tensor(s.columns.logprobs.tolist())).exp().clamp(max=2.0)
        total = total - (w * torch.minimum(u * a, u.clamp(0.8, 1.2) * a) * mask).sum()
        count += int(mask.sum())
    return total / count


@pytest.mark.parametrize(("minibatches", "epochs"), [(2, 1), (1, 3), (2, 2)])
def test_the_steps_are_those_of_a_plain_loop_with_one_anchor(minibatches, epochs, tmp_path):
    batch = make_batch(groups=4)
    found, result = stepped(tmp_path, batch=batch, minibatches=minibatches, epochs=epochs, token_budget=60)
    plain = tiny_model(attention="eager")
    adam = torch.optim.AdamW(plain.parameters(), lr=LR.lr, betas=LR.betas, eps=LR.eps, weight_decay=0)
    size = len(batch.groups) // minibatches
    parts = [Batch(0, batch.groups[i : i + size]) for i in range(0, len(batch.groups), size)]
    with torch.no_grad():
        anchors = [logprobs_of(plain, part) for part in parts]
    for _ in range(epochs):
        for part, anchor in zip(parts, anchors, strict=True):
            adam.zero_grad()
            plain_loss(part, logprobs_of(plain, part), anchor).backward()
            adam.step()
    assert apart(found, plain.parameters()) < 1e-5
    assert result.metrics["updates"] == minibatches * epochs


def test_the_clip_acts_from_the_second_step_on(tmp_path):
    tight, wide = PolicyGradient(clip_low=1e-3, clip_high=1e-3), PolicyGradient(clip_low=0.9, clip_high=10.0)
    one, other = (stepped(tmp_path, algorithm)[0] for algorithm in (tight, wide))
    assert apart(one, other) == 0.0
    one, other = (stepped(tmp_path, algorithm, epochs=2)[0] for algorithm in (tight, wide))
    assert apart(one, other) > 1e-4


def test_the_token_budget_changes_no_step(tmp_path):
    whole, _ = stepped(tmp_path, minibatches=2, epochs=2)
    rows, _ = stepped(tmp_path, minibatches=2, epochs=2, token_budget=40)
    assert apart(whole, rows) < 1e-5


def test_the_same_batch_and_weights_give_the_same_bits(tmp_path):
    one, other = (stepped(tmp_path, minibatches=2, epochs=2) for _ in range(2))
    assert apart(one[0], other[0]) == 0.0
    assert one[1].metrics == other[1].metrics
    assert one[1].logprob_gap == other[1].logprob_gap


def test_what_is_told_of_a_batch_is_measured_before_its_first_update(tmp_path):
    _, one = stepped(tmp_path)
    _, several = stepped(tmp_path, minibatches=2, epochs=2)
    for age, gap in one.logprob_gap.items():
        assert several.logprob_gap[age] == pytest.approx(gap, rel=1e-4)
    assert several.metrics["importance_max"] == pytest.approx(one.metrics["importance_max"], rel=1e-4)


@pytest.mark.parametrize(
    "algorithm",
    [
        PolicyGradient(kind="bypass"),
        PolicyGradient(proximal="interpolate"),
        PolicyGradient(kind="m2po"),
        PolicyGradient(kind="ppo", anchor="behavior", correction=None),
    ],
)
def test_no_token_is_measured_after_an_update(algorithm, tmp_path):
    """Without a pass before the first update only the first part is measured; with one, for another reason,
    the whole batch."""
    batch, has_first_pass = make_batch(groups=4), algorithm.kind in ("m2po", "ppo")
    _, one = stepped(tmp_path, algorithm, batch if has_first_pass else Batch(0, batch.groups[:2]))
    _, several = stepped(tmp_path, algorithm, batch, minibatches=2, epochs=2)
    for age, measured in one.logprob_gap.items():
        assert several.logprob_gap[age] == pytest.approx(measured, rel=1e-4)
    assert several.metrics["entropy"] > 0


def failing(trainer, update):
    """The gradient is not finite in that update."""
    seen = []

    def spoil(gradient):
        seen.append(len(seen))
        return gradient * (math.inf if len(seen) > update else 1.0)

    trainer.model.get_input_embeddings().weight.register_hook(spoil)
    return trainer


def test_what_fails_before_the_first_update_changes_nothing(tmp_path):
    trainer = failing(make_trainer(minibatches=2), 0)
    before = weights_of(trainer)
    with pytest.raises(TrainingError, match="step 0 -> 1: the gradient norm is"):
        trainer.step(make_batch(), rejected_dir=tmp_path)
    assert apart(before, weights_of(trainer)) == 0.0
    assert trainer.version == 0


def test_what_fails_after_an_update_loses_the_weights(tmp_path):
    trainer = failing(make_trainer(minibatches=2), 1)
    with pytest.raises(WeightsError, match=r"after 1 of its updates: the weights are lost"):
        trainer.step(make_batch(), rejected_dir=tmp_path)
    assert trainer.version == 0


def test_each_part_has_whole_groups_and_weights_of_its_own():
    batch = make_batch(groups=5)
    flat = flatten(batch, build(PolicyGradient()), max_tokens=24, minibatches=2)
    assert [len(part) for part in flat.minibatches] == [2, 3]
    first = sum(len(s.columns) for group in batch.groups[:2] for s in group.sequences)
    assert flat.weights_C[:first].sum() == pytest.approx(1.0)
    assert flat.weights_C[first:].sum() == pytest.approx(1.0)
    assert len(flatten(batch, build(PolicyGradient()), max_tokens=24, minibatches=9).minibatches) == 5


def test_a_part_without_a_trained_token_makes_no_step(tmp_path):
    batch = make_batch(groups=2)
    masked = [msgspec.structs.replace(s, mask=[False] * len(s.columns)) for s in batch.groups[0].sequences]
    batch = Batch(0, [msgspec.structs.replace(batch.groups[0], sequences=masked), batch.groups[1]])
    assert stepped(tmp_path, batch=batch, minibatches=2)[1].metrics["updates"] == 1


def test_an_interpolated_anchor_worked_by_hand():
    # Half of the steps are made. A token of age 0: the policy that sampled; of age 1: two thirds of the way
    found = interpolated(np.array([-1.0, -1.0]), np.array([-4.0, -4.0]), np.array([0.0, 1.0]), 0.5)
    np.testing.assert_allclose(found, [-4.0, -2.0])


def test_an_interpolated_anchor_counts_the_steps_that_are_made(tmp_path):
    """Three planned parts of two groups are two: the second step is halfway, as it is of two planned."""
    progress_values = []
    for minibatches in (2, 3):
        trainer = make_trainer(
            replace(build(PolicyGradient()), proximal="interpolate"), minibatches=minibatches
        )
        accumulate = trainer._accumulate
        trainer._accumulate = lambda prepared, part, progress, run=accumulate, **first: (
            progress_values.append(progress),
            run(prepared, part, progress, **first),
        )[1]
        trainer.step(make_batch(groups=2), rejected_dir=tmp_path)
    assert progress_values == [0.0, 0.5] * 2


def test_an_interpolated_anchor_needs_no_pass_and_makes_other_steps(tmp_path):
    interpolating = replace(build(PolicyGradient()), proximal="interpolate")
    trainer = make_trainer(interpolating, optimizer=LR, epochs=2)
    trainer._logprobs = None
    trainer.step(make_batch(groups=4), rejected_dir=tmp_path)
    assert apart(weights_of(trainer), stepped(tmp_path, epochs=2)[0]) > 1e-5


def test_a_batch_that_was_cut_off_in_the_middle_is_repeated_from_the_same_weights(tmp_path):
    several = {"minibatches": 2, "epochs": 2, "optimizer": LR}
    whole, cut = make_trainer(**several), make_trainer(**several)
    whole.step(make_batch(0), rejected_dir=tmp_path)
    saved = save_checkpoint(whole, tmp_path)
    whole.step(make_batch(1), rejected_dir=tmp_path)
    load_checkpoint(failing(cut, 2), saved)
    with pytest.raises(WeightsError):
        cut.step(make_batch(1), rejected_dir=tmp_path)
    again = make_trainer(**several)
    load_checkpoint(again, saved)
    again.step(make_batch(1), rejected_dir=tmp_path)
    assert apart(weights_of(cut), weights_of(again)) > 0
    assert apart(weights_of(whole), weights_of(again)) == 0.0
