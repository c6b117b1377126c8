from __future__ import annotations

import math

import pytest
import torch

from millrace.trainer import row_logprobs
from millrace.trainer.row_logprobs import token_logprobs


def problem(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(13, 8, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(31, 8, generator=generator, dtype=dtype).requires_grad_()
    return hidden, weight, torch.randint(0, 31, (13,), generator=generator)


@pytest.mark.parametrize("chunk", [1, 31 * 4, 10**6])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_chunked_logprobs_and_gradients_equal_full_logits(chunk, temperature, softcap, monkeypatch):
    monkeypatch.setattr(row_logprobs, "CHUNK_LOGITS", chunk)
    hidden, weight, targets = problem(torch.float32)
    slopes = torch.linspace(-1, 1, 13)
    ours, entropy = token_logprobs(hidden, weight, targets, temperature=temperature, softcap=softcap)
    found = torch.autograd.grad((ours * slopes).sum(), [hidden, weight])
    logits = hidden @ weight.T
    capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    full = (capped / temperature).log_softmax(-1)
    theirs = full.gather(-1, targets[:, None])[:, 0]
    expected = torch.autograd.grad((theirs * slopes).sum(), [hidden, weight], retain_graph=True)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1), atol=1e-5, rtol=1e-5)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("chunk", "softcap", "times"), [(10**6, None, 1), (10**6, 3.0, 2), (31 * 5, None, 6)]
)
def test_logits_of_one_chunk_are_computed_once(chunk, softcap, times, monkeypatch):
    monkeypatch.setattr(row_logprobs, "CHUNK_LOGITS", chunk)
    calls, original = [], row_logprobs._scaled_logits
    monkeypatch.setattr(row_logprobs, "_scaled_logits", lambda *args: calls.append(1) or original(*args))
    hidden, weight, targets = problem(torch.float32)
    values, _ = token_logprobs(hidden, weight, targets, temperature=1.0, softcap=softcap)
    values.sum().backward()
    assert len(calls) == times


def test_uniform_logits_worked_by_hand():
    values, entropy = token_logprobs(
        torch.zeros(2, 4), torch.ones(10, 4), torch.tensor([0, 9]), temperature=1.0
    )
    assert values.tolist() == pytest.approx([-math.log(10)] * 2)
    assert entropy.tolist() == pytest.approx([math.log(10)] * 2)


def test_low_precision_hidden_states_accumulate_the_weight_gradient_in_float32():
    hidden, weight, targets = problem(torch.float32)
    values, _ = token_logprobs(hidden.to(torch.bfloat16), weight, targets, temperature=1.0)
    values.sum().backward()
    assert values.dtype == weight.grad.dtype == torch.float32
    assert torch.isfinite(weight.grad).all()


@pytest.mark.parametrize("chunk", [31 * 4, 10**6])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.5, 3.0)])
def test_the_gradient_of_entropies_is_that_of_full_logits(chunk, temperature, softcap, monkeypatch):
    monkeypatch.setattr(row_logprobs, "CHUNK_LOGITS", chunk)
    hidden, weight, targets = problem()
    slopes, bends = torch.linspace(-1, 1, 13).double(), torch.linspace(2, -1, 13).double()
    ours, entropy = token_logprobs(hidden, weight, targets, temperature=temperature, softcap=softcap)
    found = torch.autograd.grad((ours * slopes + entropy * bends).sum(), [hidden, weight])
    logits = hidden @ weight.T
    capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    full = (capped / temperature).log_softmax(-1)
    theirs = full.gather(-1, targets[:, None])[:, 0] * slopes - (full.exp() * full).sum(-1) * bends
    for one, other in zip(found, torch.autograd.grad(theirs.sum(), [hidden, weight]), strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


def test_entropies_that_nobody_differentiates_change_no_bit():
    hidden, weight, targets = problem(torch.float32)
    alone, _ = token_logprobs(hidden, weight, targets, temperature=1.0)
    (one,) = torch.autograd.grad(alone.sum(), [weight])
    both, entropy = token_logprobs(hidden, weight, targets, temperature=1.0)
    (other,) = torch.autograd.grad((both + entropy.detach()).sum(), [weight])
    assert torch.equal(one, other)


def test_logits_of_low_precision_factors_are_not_rounded():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 256, generator=generator).bfloat16()
    weight = (0.6 * torch.randn(3000, 256, generator=generator)).bfloat16()
    logits = hidden.double() @ weight.double().T
    targets = logits.argmax(-1)
    exact = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    rounded = logits.bfloat16().double().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    ours, _ = token_logprobs(hidden, weight, targets, temperature=1.0)
    assert 0.05 < (rounded - exact).abs().max() < 0.15  # nats
    assert (ours - exact).abs().max() < 1e-4


def test_the_gradient_of_low_precision_factors_is_as_exact_as_these():
    hidden, weight, targets = (x.detach() for x in problem())
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        factors = [x.bfloat16().to(dtype).requires_grad_() for x in (hidden, weight)]
        values, _ = token_logprobs(*factors, targets, temperature=1.0)
        results.append(torch.autograd.grad((values.double() * torch.linspace(-1, 1, 13)).sum(), factors))
    for found, expected in zip(*results, strict=True):
        assert (found - expected).abs().max() < 0.01 * expected.abs().max()


def test_on_a_gpu_the_gradient_of_the_projection_is_added_to_the_sum_over_rows(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, generator=generator).requires_grad_() for size in ((9, 8), (40, 8)))
    targets = torch.randint(40, (9,), generator=generator)

    def backward(rounded):
        token_logprobs(hidden, weight, targets, temperature=0.7, rounded_VH=rounded)[0].sum().backward()

    backward(None)
    expected, of_hidden, hidden.grad = weight.grad.clone(), hidden.grad, None
    monkeypatch.setattr(row_logprobs, "has_own_memory", lambda device: True)
    weight.grad.fill_(1.0)
    sums = weight.grad
    backward(weight.detach().clone())
    assert weight.grad is sums
    torch.testing.assert_close(weight.grad, expected + 1)
    torch.testing.assert_close(hidden.grad, of_hidden)
