"""A CPU computes in bfloat16 what autocast computes, or nearer to the truth, and keeps less for gradients."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call
from trainer_doubles import tiny_model

from millrace.trainer import model as trainer_model
from millrace.trainer import row_logprobs
from millrace.trainer.kernels import fused_attention, on_cpu
from millrace.trainer.kernels.on_cpu import install_linear
from millrace.trainer.kernels.products import rounded_once
from millrace.trainer.model import served_weights
from millrace.trainer.row_logprobs import token_logprobs

Tensor = torch.Tensor
ROUNDING = 2.0**-8  # of bfloat16


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def results(compute: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The output, and the gradient of each input."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = compute(*inputs)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)
    return [out, *torch.autograd.grad(out, inputs, slope)]


@pytest.mark.parametrize("biased", [True, False])
def test_a_linear_layer_gives_what_autocast_gives(biased: bool) -> None:
    inputs = [random(2, 7, 24), random(40, 24, seed=1), *([random(40, seed=2)] if biased else [])]
    layer = torch.nn.Linear(24, 40, bias=biased)
    install_linear(layer)
    found = results(
        lambda x, *own: functional_call(layer, dict(zip(("weight", "bias"), own, strict=False)), x), *inputs
    )
    expected = results(lambda x, w, b=None: F.linear(x, w, b), *inputs)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        scale = theirs.abs().max()
        assert (ours - theirs).abs().max() <= 2 * ROUNDING * scale


def test_rows_share_one_rounded_copy_of_a_weight_while_the_weights_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[Tensor] = []
    compute = on_cpu.matmul

    def noted(x: Tensor, factor_t: Tensor) -> Tensor:
        used.append(factor_t.t())
        return compute(x, factor_t)

    monkeypatch.setattr(on_cpu, "matmul", noted)
    model = tiny_model(attention="eager")
    install_linear(model)
    layers = [module for module in model.model.modules() if isinstance(module, torch.nn.Linear)]
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16), rounded_once(model, torch.bfloat16):
            for _ in range(2):
                model.model(torch.tensor([[1, 2, 3]]))
        first, second = used[: len(layers)], used[len(layers) :]
        assert [x.data_ptr() for x in first] == [x.data_ptr() for x in second]
        for rounded, layer in zip(first, layers, strict=True):
            assert torch.equal(rounded, layer.weight.bfloat16())
        for layer in layers:  # an optimizer step: the next copies are of these weights
            layer.weight.data += 0.1
        used.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.model(torch.tensor([[1, 2, 3]]))
    assert {x.data_ptr() for x in used}.isdisjoint(x.data_ptr() for x in first)


def narrow_storages() -> set[int]:
    gc.collect()  # an address that is freed later could be that of a copy
    tensors = [x for x in gc.get_objects() if type(x) is Tensor and x.dtype == torch.bfloat16]
    return {x.untyped_storage().data_ptr() for x in tensors if x.numel() and x.layout is torch.strided}


def test_a_copy_that_only_rounds_a_weight_is_freed_before_the_first_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer_model, "SMALL", 0)
    model, others = tiny_model(attention="eager"), narrow_storages()
    with served_weights(model, published=torch.bfloat16, computing=torch.bfloat16):
        copies = narrow_storages() - others
    assert len(copies) == sum(type(module) is torch.nn.Linear for module in model.modules())


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_attention_is_nearer_to_the_truth_than_in_bfloat16(masked: bool, kv_heads: int) -> None:
    query, key = random(3, 4, 9, 16), random(3, kv_heads, 9, 16, seed=1)
    value = random(3, kv_heads, 9, 16, seed=2)
    mask = torch.ones(9, 9, dtype=torch.bool).tril(1)[None, None] if masked else None

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = kv_heads != 4
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=0.3, enable_gqa=grouped
        )

    rounded = [x.detach().bfloat16().double().requires_grad_() for x in (query, key, value)]
    with torch.autocast("cpu", enabled=False):
        out = plain(*rounded)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).bfloat16().double()
    truth = [out, *torch.autograd.grad(out, rounded, slope)]
    ours = results(lambda q, k, v: fused_attention.attention(q, k, v, mask, 0.3), query, key, value)
    theirs = results(plain, query, key, value)
    for true, near, far in zip(truth, ours, theirs, strict=True):
        gap = (near.double() - true).abs().max()
        assert gap <= ROUNDING * true.abs().max()
        assert gap <= (far.double() - true).abs().max() + ROUNDING * true.abs().max() / 4


def test_the_head_of_a_row_in_bfloat16_has_the_gradient_of_the_rounded_numbers() -> None:
    hidden, weight = random(30, 32), random(400, 32, seed=1)
    targets = torch.arange(30)
    rounded = hidden.detach().bfloat16().requires_grad_()
    found = token_logprobs(rounded, weight, targets, temperature=0.7)[0]
    ours = [found, *torch.autograd.grad(found.sum(), (rounded, weight))]
    wide = [hidden.detach().bfloat16().double(), weight.detach().bfloat16().double()]
    leaves = [x.requires_grad_() for x in wide]
    true = F.log_softmax(leaves[0] @ leaves[1].T / 0.7, -1)[targets, targets]
    expected = [true, *torch.autograd.grad(true.sum(), leaves)]
    assert (found.double() - true).abs().max() < 1e-4  # logits are not rounded
    for got, want in zip(ours, expected, strict=True):
        assert (got.double() - want).abs().max() <= 2 * ROUNDING * want.abs().max()


def test_rows_that_are_computed_at_the_same_time_come_to_the_head_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compute, alone = row_logprobs._scaled_logits, []

    def noted(*args: Tensor) -> Tensor:
        alone.append(row_logprobs.TURN.locked())
        return compute(*args)

    monkeypatch.setattr(row_logprobs, "_scaled_logits", noted)
    monkeypatch.setattr(row_logprobs, "CHUNK_LOGITS", 4000)
    hidden = torch.zeros((60, 32), requires_grad=True)
    found = token_logprobs(hidden, random(400, 32), torch.arange(60), temperature=1.0)[0]
    assert not row_logprobs.TURN.locked()
    found.sum().backward()
    assert (
        alone == 12 * [True] and not row_logprobs.TURN.locked()
    )  # six chunks, computed again for the gradient
