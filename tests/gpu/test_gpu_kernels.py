"""Kernels of a GPU against the general way on the same GPU."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from engine_models import CONFIGS
from test_trainer_adapter import with_adapter
from trainer_doubles import make_batch, make_trainer, tiny_model

from millrace.core.types import Sampling
from millrace.devices.matmul import (
    add_matmul,
    group_ends,
    grouped_linear,
    has_grouped,
    matmul_wide,
    wide_factor,
)
from millrace.engines.own.accelerated import drawn, fused
from millrace.engines.own.architecture import architecture_of
from millrace.engines.own.sampler import TokenSampler
from millrace.trainer import row_logprobs
from millrace.trainer.kernels import fp8_matmul, fused_attention, on_gpu, products

pytestmark = pytest.mark.gpu


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


def test_the_fused_softmax_runs_and_agrees(gpu):
    kernels = row_logprobs.fused(gpu)
    assert kernels is not None, "the log says why"
    assert row_logprobs.disagreement(kernels, gpu) < row_logprobs.TOLERANCE


@pytest.mark.parametrize(
    "setting", [{}, {"top_p": 0.95}, {"top_k": 50}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.02}]
)
def test_tokens_of_a_large_vocabulary_are_those_of_the_cpu(setting, gpu):
    samplings = [Sampling(max_tokens=1, token_masks=False, temperature=0.8, **setting)] * 64
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn((64, 151_936), generator=generator)
    uniforms = torch.rand(64, generator=generator, dtype=torch.float64)
    expected = TokenSampler(samplings, torch.device("cpu"))(logits, uniforms)
    found = TokenSampler(samplings, gpu)(logits.to(gpu), uniforms.to(gpu))
    same = found.tokens.cpu() == expected.tokens
    assert same.float().mean() > 0.95
    assert (found.logprobs.cpu() - expected.logprobs)[same].abs().max() < 1e-3


@pytest.mark.parametrize(
    "name",
    ["qwen3 tied", "phi3", "llama tied", "gemma2", "gemma3", "glm4", "granite", "qwen3_moe", "gpt_oss"],
)
def test_the_kernels_of_a_layer_run_and_agree(name, gpu):
    shape = architecture_of(CONFIGS[name])
    assert fused.disagreement(shape, torch.bfloat16, gpu) < fused.TOLERANCE


@pytest.mark.parametrize("rows", [1, 8, 32, 33, 128, 256])
def test_a_product_with_its_gate_is_that_of_torch(rows, gpu):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 1024, device=gpu).bfloat16(), torch.randn(6144, 1024, device=gpu) / 32
    weight = weight.bfloat16()
    found = fused.OPERATORS.gated_linear(x, weight, None, "silu")
    assert error(found, fused.gated_linear(x.double(), weight.double(), None, "silu")) < 0.01


def test_sums_of_repeated_rows_run_and_are_right(gpu):
    assert fused_attention.sums_repeats(gpu), "the log says why"


@pytest.mark.parametrize("rows", [8, 64, 256])
@pytest.mark.parametrize(("window", "cap", "has_sinks"), [(None, None, False), (300, 5.0, True)])
def test_a_decode_step_attends_to_what_is_there_each_time(rows, window, cap, has_sinks, gpu):
    """Programs of a row count, and the last one adds up: a race would show among many calls."""
    torch.manual_seed(0)
    q = torch.randn(rows, 16, 128, device=gpu).bfloat16()
    keys, values = (torch.randn(rows, 1500, 8, 128, device=gpu).bfloat16() for _ in range(2))
    used = torch.randint(1, 1500, (rows,), dtype=torch.int32, device=gpu)
    counts = torch.zeros(rows * 8, dtype=torch.int32, device=gpu)
    sinks = torch.randn(16, device=gpu).bfloat16() if has_sinks else None
    inputs = (q, keys, values, sinks, used, counts, None, 0.1, cap, window)
    found = fused.OPERATORS.attended(*inputs)
    assert error(found, fused.attended(*inputs).double()) < 0.01
    for _ in range(100):
        assert torch.equal(fused.OPERATORS.attended(*inputs), found) and not counts.any()


def test_the_kernel_that_draws_runs_and_agrees_with_the_cpu(gpu):
    assert drawn.disagreement(gpu, TokenSampler) < drawn.TOLERANCE and drawn.has_kernel(gpu, TokenSampler)


def test_factors_in_bfloat16_give_float32(gpu):
    torch.manual_seed(0)
    a, b = torch.randn(64, 512, device=gpu).bfloat16(), torch.randn(512, 96, device=gpu)
    factor = wide_factor(b, torch.bfloat16)
    out = matmul_wide(a, factor)
    assert out.dtype == torch.float32 and error(out, a.double() @ factor.double()) < 1e-5
    total = torch.ones(70_000, 96, device=gpu)
    rows = torch.randn(70_000, 512, device=gpu).bfloat16()
    add_matmul(total, rows, factor)
    assert error(total, 1 + rows.double() @ factor.double()) < 1e-5


def test_groups_meet_their_matrices(gpu):
    if not has_grouped(gpu, torch.bfloat16, [(4, 64, 32)]):
        pytest.skip("torch groups matmuls on Hopper and Blackwell only")
    torch.manual_seed(0)
    x, weight = torch.randn(100, 32, device=gpu).bfloat16(), torch.randn(4, 64, 32, device=gpu).bfloat16()
    x.requires_grad_()
    groups = torch.randint(3, (100,), device=gpu).sort().values  # none of group 3
    out = grouped_linear(x, weight, group_ends(groups, 4))
    expected = torch.einsum("mi,moi->mo", x.double(), weight[groups].double())
    assert error(out, expected) < 0.01
    slope = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, x, slope)
    assert error(found, torch.einsum("mo,moi->mi", slope.double(), weight[groups].double())) < 0.01


@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "adapted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_model_gives_the_same_gradient(dtype, adapted, gpu, monkeypatch):
    gradients = []
    for compiles in (False, True):
        model = tiny_model()
        model = (with_adapter(model, published=dtype) if adapted else model).to(gpu)
        module = sys.modules[type(model).__module__]
        monkeypatch.setattr(module, on_gpu.ROTATE, getattr(module, on_gpu.ROTATE))
        if compiles:
            products.install_linear(model)
            on_gpu.install_compiled(model)
        make_trainer(model=model, dtype=dtype, published=dtype).accumulate(make_batch())
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in trained]))
    assert error(gradients[1], gradients[0].double()) < (1e-4 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("tokens", [1, 100, 4096])
def test_layers_in_fp8_are_as_near_to_the_truth_as_on_a_cpu(tokens, gpu):
    if torch.cuda.get_device_capability(gpu) < (8, 9):
        pytest.skip("matmuls in fp8 need compute capability 8.9")
    assert not fp8_matmul.why_no_kernel(gpu)
    torch.manual_seed(0)
    x, grad = torch.randn(tokens, 1024).bfloat16(), torch.randn(tokens, 3072).bfloat16()
    weight = torch.randn(3072, 1024).bfloat16()
    quantise = on_gpu.compiled(fp8_matmul.quantised, on_gpu.INDUCTOR)
    ours = fp8_matmul.fp8_weight(weight.to(gpu), partial(on_gpu._quantised, quantise))
    cpus = fp8_matmul.fp8_weight(weight, fp8_matmul.quantised)
    for found, of_cpu, true in (
        (ours.output(x.to(gpu)), cpus.output(x), x.double() @ weight.double().t()),
        (ours.input_gradient(grad.to(gpu)), cpus.input_gradient(grad), grad.double() @ weight.double()),
    ):
        assert error(found.cpu(), of_cpu.double()) < 0.01  # numbers in the middle of two go to either
        assert error(found.cpu(), true) < 0.045
    grad[0, 3] = torch.nan
    assert ours.input_gradient(grad.to(gpu))[0].isnan().all()


def test_attention_has_a_name(gpu):
    assert "FlashAttention" in on_gpu.activate(gpu)
