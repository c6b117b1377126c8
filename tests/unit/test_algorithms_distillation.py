"""A teacher's log-probs as advantages."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from test_algorithms_presets import MAX_TOKENS, large_batch, tables
from trainer_doubles import make_trainer, save_tiny_model, tiny_model

from millrace.config.tables.algorithms import PolicyGradient
from millrace.core.completion.columns import TokenColumns
from millrace.core.errors import DataError
from millrace.core.types import Batch, TrainGroup, TrainSequence
from millrace.trainer.ranks.mesh import ALONE
from millrace.trainer.role import load_teacher

CPU = torch.device("cpu")


@pytest.mark.parametrize("budget", [10_000, 60, 1])
def test_the_gradient_is_that_of_rewards_and_teacher_together(budget):
    batch = large_batch()
    old, pi = tables(batch)
    teacher = np.minimum(old + np.random.default_rng(5).normal(0, 0.4, old.size), -0.05)
    config = PolicyGradient(
        kind="reinforce", teacher="t", teacher_weight=0.5, reward_weight=2.0, normalize="token"
    )
    trainer = make_trainer(
        config, dtype=torch.float64, max_tokens=MAX_TOKENS, epochs=2, reference=True, token_budget=budget
    )
    table = torch.tensor(old)
    trainer._forward = lambda row, reference=False: (
        (torch.tensor(teacher) if reference else table)[row.flat_N],
        torch.zeros(len(row.flat_N)),
    )
    prepared = trainer._prepared(batch, 1)
    table = torch.tensor(pi, requires_grad=True)
    trainer._accumulate(prepared, 0, 0.5)
    mask = np.concatenate([np.asarray(s.mask) for g in batch.groups for s in g.sequences])
    mu = np.concatenate([np.asarray(s.columns.logprobs, float) for g in batch.groups for s in g.sequences])
    rewards = np.concatenate([np.full(len(s.mask), s.reward) for g in batch.groups for s in g.sequences])
    advantages = 2.0 * rewards + 0.5 * (teacher - old)
    due = -np.minimum(np.exp(old - mu), 2.0) * np.exp(pi - old) * advantages / mask.sum()
    np.testing.assert_allclose(table.grad.numpy(), np.where(mask, due, 0.0), rtol=1e-9, atol=1e-12)


def test_a_student_comes_nearer_to_its_teacher_on_what_it_samples(tmp_path):
    """Completions of the student itself, without any reward."""
    model, plain = tiny_model(), tiny_model(attention="sdpa")
    trainer = make_trainer(
        PolicyGradient(teacher="t", reward_weight=0.0, correction=None),
        model=model,
        reference=tiny_model(seed=1),
    )
    noise = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def sampled(version):
        plain.load_state_dict(trainer.model.state_dict())
        tokens_BT = torch.full((512, 1), 3)
        for _ in range(4):
            last = plain(input_ids=tokens_BT).logits[:, -1].softmax(-1)
            tokens_BT = torch.cat([tokens_BT, torch.multinomial(last, 1, generator=noise)], 1)
        logprobs = plain(input_ids=tokens_BT).logits[:, :-1].log_softmax(-1)
        logprobs = logprobs.gather(-1, tokens_BT[:, 1:, None])[..., 0].tolist()
        sequences = [
            TrainSequence(i, TokenColumns.of(tokens, logprobs[i], [version] * 4), 0.0, False)
            for i, tokens in enumerate(tokens_BT[:, 1:].tolist())
        ]
        return Batch(version, [TrainGroup(0, [3], sequences)])

    gaps = [
        trainer.step(sampled(version), rejected_dir=tmp_path).metrics["kl_reference"] for version in range(8)
    ]
    assert gaps[-1] < 0.7 * gaps[0], list(map(float, gaps))


def test_a_teacher_and_its_weights_are_refused_where_they_mean_nothing():
    with pytest.raises(ValidationError, match=r"`algorithm\.kl`"):
        PolicyGradient(teacher="t", kl=0.1)
    with pytest.raises(ValidationError, match=r"`algorithm\.reward_weight`"):
        PolicyGradient(reward_weight=0.0)


def test_a_teacher_with_other_tokens_is_refused(tmp_path):
    for name, vocabulary in (("student", {"a": 0}), ("other", {"b": 0})):
        save_tiny_model(tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    for name, ids in (("student", (1,)), ("more", (1, 2)), ("moved", (2,))):
        save_tiny_model(tmp_path / name)
        added = [{"id": id, "content": f"<{i}>"} for i, id in enumerate(ids)]
        tokenizer = {"model": {"vocab": {"a": 0}}, "added_tokens": added}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(tokenizer))
    student = str(tmp_path / "student")
    assert load_teacher(str(tmp_path / "more"), student=student, device=CPU, ranks=ALONE)
    with pytest.raises(DataError, match=r"differ in the added tokens \[\(1, '<0>'\)\]"):
        load_teacher(str(tmp_path / "moved"), student=student, device=CPU, ranks=ALONE)
    assert load_teacher(student, student=student, device=CPU, ranks=ALONE).num_parameters() > 0
    with pytest.raises(DataError, match="has other tokens"):
        load_teacher(str(tmp_path / "other"), student=student, device=CPU, ranks=ALONE)
    with pytest.raises(DataError, match=r"`algorithm.teacher`.*no config\.json"):
        load_teacher(str(tmp_path), student=student, device=CPU, ranks=ALONE)
