"""Where sampling cuts tokens off, the trainer's policies are renormalised over those that could come."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from trainer_doubles import VOCAB, choosing, make_batch, make_trainer, tiny_model

from millrace.algorithms import TokenLogprobs
from millrace.config.tables.algorithms import PolicyGradient
from millrace.core.completion.columns import TokenColumns
from millrace.core.completion.token_masks import AllowedTokens
from millrace.core.errors import DataError
from millrace.trainer import row_logprobs
from millrace.trainer.recorded import TokenMasks, token_masks_of
from millrace.trainer.row_logprobs import masks_on, token_logprobs

CPU = torch.device("cpu")


def reference_gradient(weight, hidden, could, targets, slopes):
    """d sum(slopes log pi) / d weight in plain NumPy: pi is a softmax over `could` of each token alone."""
    gradient = np.zeros_like(weight)
    for x, among, target, slope in zip(hidden, could, targets, slopes, strict=True):
        logits = weight[among] @ x
        probs = np.exp(logits - logits.max())
        probs /= probs.sum()
        for token, prob in zip(among, probs, strict=True):
            gradient[token] += slope * ((token == target) - prob) * x
    return gradient


def test_a_distribution_over_two_of_four_tokens_worked_by_hand():
    weight = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    token_masks = masks_on(CPU, TokenMasks(np.array([2, 0]), np.array([0, 2], np.int32)), 0, 4)
    found, entropy = token_logprobs(
        torch.tensor([[math.log(2)], [math.log(2)]]), weight, torch.tensor([2, 2]), temperature=1.0,
        token_masks=token_masks,
    )  # fmt: skip
    assert found.exp().tolist() == pytest.approx([8 / (2 + 8), 8 / (2 + 4 + 8 + 16)])
    due = -(0.2 * math.log(0.2) + 0.8 * math.log(0.8))
    assert entropy[0].item() == pytest.approx(due)


@pytest.mark.parametrize("chunk", [1, VOCAB * 3, 10**6])
def test_the_gradient_is_that_of_a_softmax_over_the_choices_alone(chunk, monkeypatch):
    monkeypatch.setattr(row_logprobs, "CHUNK_LOGITS", chunk)
    random = np.random.default_rng(0)
    could = [np.sort(random.choice(VOCAB, size, replace=False)) for size in random.integers(1, 12, 17)]
    could[5] = np.arange(VOCAB)
    targets = np.array([random.choice(among) for among in could])
    hidden, weight = random.normal(size=(17, 8)), random.normal(size=(VOCAB, 8))
    slopes = random.normal(size=17)
    counts = np.array([0 if len(among) == VOCAB else len(among) for among in could])
    tokens = np.concatenate([among for among in could if len(among) < VOCAB]).astype(np.int32)
    head = torch.tensor(weight, requires_grad=True)
    found, _ = token_logprobs(
        torch.tensor(hidden), head, torch.tensor(targets), temperature=1.0,
        token_masks=masks_on(CPU, TokenMasks(counts, tokens), 0, VOCAB),
    )  # fmt: skip
    (found * torch.tensor(slopes)).sum().backward()
    due = reference_gradient(weight, hidden, could, targets, slopes)
    np.testing.assert_allclose(head.grad.numpy(), due, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.5, 3.0)])
def test_capped_logits_and_entropies_have_the_gradient_of_autograd(temperature, softcap):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 8, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(31, 8, generator=generator, dtype=torch.float64).requires_grad_()
    could = torch.rand(9, 31, generator=generator) < 0.3
    targets = torch.randint(0, 31, (9,), generator=generator)
    could[torch.arange(9), targets] = True
    token_masks = masks_on(CPU, TokenMasks(could.sum(1).numpy(), could.nonzero()[:, 1].int().numpy()), 0, 31)
    ours, entropy = token_logprobs(
        hidden, weight, targets, temperature=temperature, softcap=softcap, token_masks=token_masks
    )
    logits = hidden @ weight.T
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    full = logits.masked_fill(~could, -torch.inf).log_softmax(-1)
    bent = -(full.exp() * full.masked_fill(~could, 0.0)).sum(-1)
    slopes, bends = torch.linspace(-1, 1, 9).double(), torch.linspace(2, -1, 9).double()
    found = torch.autograd.grad((ours * slopes + entropy * bends).sum(), [hidden, weight])
    theirs = full.gather(-1, targets[:, None])[:, 0]
    due = torch.autograd.grad((theirs * slopes + bent * bends).sum(), [hidden, weight])
    for one, other in zip((ours, entropy, *found), (theirs, bent, *due), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-9)


def gradient_of(batch, **changes):
    trainer = make_trainer(
        PolicyGradient(kl=0.1, entropy=0.1), model=tiny_model().double(), dtype=torch.float64, **changes,
        reference=tiny_model(seed=1).double(),
    )  # fmt: skip
    loss = trainer.accumulate(batch).loss
    return loss, torch.cat([p.grad.flatten() for p in trainer.trained])


def test_choices_are_part_of_every_policy_and_packing_changes_nothing():
    batch = choosing(make_batch(version=1))
    due_loss, due = gradient_of(batch)
    for budget in (60, 1):
        loss, gradient = gradient_of(batch, token_budget=budget)
        assert loss == pytest.approx(due_loss, rel=1e-9)
        assert (gradient - due).norm() < 1e-6 * due.norm()  # rotary angles are in float32
    assert gradient_of(make_batch(version=1))[0] != pytest.approx(due_loss, rel=1e-3)


def test_the_reference_and_the_policy_at_the_beginning_are_cut_too():
    seen: list[TokenLogprobs] = []
    trainer = make_trainer(PolicyGradient(kl=0.1), reference=tiny_model(), epochs=2)
    objective = trainer.algorithm.objective

    def looking(xp, batch_logprobs, advantages_N):
        seen.append(batch_logprobs)
        return objective(xp, batch_logprobs, advantages_N)

    trainer.algorithm = replace(trainer.algorithm, objective=looking)
    prepared = trainer._prepared(choosing(make_batch(version=1)), 1)
    trainer._accumulate(prepared, 0, 0.5)
    for batch_logprobs in seen:  # the same model three times
        torch.testing.assert_close(batch_logprobs.reference_N, batch_logprobs.fixed_N)
        torch.testing.assert_close(batch_logprobs.proximal_N, batch_logprobs.fixed_N)


def test_a_token_that_could_not_come_is_refused():
    (group, *_) = choosing(make_batch(version=1)).groups
    sequence = group.sequences[1]
    columns = TokenColumns.of([3, 4], [-1.0, -1.0], 1)
    columns.token_masks = AllowedTokens()
    for among in ([3, 5], [3, 5]):
        columns.token_masks.append(np.array(among, np.int32).tobytes())
    strange = msgspec.structs.replace(sequence, columns=columns)
    message = rf"trajectory {sequence.trajectory_id} has the token 4, .* none of the 2 tokens"
    with pytest.raises(DataError, match=message):
        token_masks_of([group.sequences[0], strange])


def test_choices_of_some_tokens_are_theirs():
    token_masks = TokenMasks(np.array([2, 0, 1, 3]), np.array([7, 8, 5, 1, 2, 3], np.int32))
    part = token_masks.of(np.array([3, 1, 0]))
    assert (part.counts_N.tolist(), part.tokens_K.tolist()) == ([3, 0, 2], [1, 2, 3, 7, 8])
