"""The norm with its own gradient: the same numbers as transformers'."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from millrace.trainer.kernels import on_cpu


def pair(
    kind: type[torch.nn.Module], size: int, *, sparing: bool = True
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The norm of transformers, and the same one quickened."""
    found = kind(size), kind(size)
    for each in found:
        with torch.no_grad():
            each.weight.copy_(torch.linspace(0.5, 1.5, size))
    on_cpu.install_norm(found[1], sparing=sparing)
    return found


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Phi3RMSNorm, Qwen3RMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize("shape", [(1, 40, 96), (1, 40, 3, 32), (1, 0, 96)])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("sparing", [False, True])
def test_outputs_are_equal_and_gradients_close(
    kind: type[torch.nn.Module], shape: tuple[int, ...], frozen: bool, sparing: bool
) -> None:
    torch.manual_seed(0)
    norms = pair(kind, shape[-1], sparing=sparing)
    x, slope = torch.randn(shape), torch.randn(shape)
    inputs = [x.clone().requires_grad_() for _ in norms]
    outputs = []
    for each, own in zip(norms, inputs, strict=True):
        each.requires_grad_(not frozen)
        outputs.append(each(own))
        outputs[-1].backward(slope)
    assert torch.equal(*outputs)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-5, atol=1e-6)
    if not frozen:
        grads = [each.weight.grad for each in norms]
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("smallest", [0.0, 1e-30, 1e-9])
def test_a_norm_whose_weights_are_0_or_nearly_so_has_the_gradient_of_torch(smallest: float) -> None:
    norms = pair(LlamaRMSNorm, 32)
    grads = []
    for each in norms:
        with torch.no_grad():
            each.weight[3] = smallest
        x = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        each(x).square().sum().backward()
        each(x).sum().backward()
        grads.append([x.grad, each.weight.grad])
    for own, of_torch in zip(*reversed(grads), strict=True):
        torch.testing.assert_close(own, of_torch, rtol=1e-5, atol=1e-5)


def test_other_formats_are_computed_as_before() -> None:
    one, quick = pair(LlamaRMSNorm, 32)
    x = torch.randn(1, 8, 32, dtype=torch.bfloat16)
    assert torch.equal(one(x), quick(x)) and quick(x).dtype == one(x).dtype
