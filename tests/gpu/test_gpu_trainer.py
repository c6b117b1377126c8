"""The trainer on a GPU against the trainer on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from test_trainer_attention import make_trees
from test_trainer_ragged import varlen_attn
from trainer_doubles import CONFIGS, make_batch, make_trainer, tiny_model

from millrace.trainer import model as trainer_model
from millrace.trainer.batch.flat_batch import flatten
from millrace.trainer.batch.packing import pack
from millrace.trainer.kernels import fused_attention
from millrace.trainer.model import row_logprobs

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")


def gradients(trainer):
    return torch.cat([parameter.grad.flatten().cpu() for parameter in trainer.model.parameters()])


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_gradient_in_float32_is_that_of_the_cpu(family, gpu):
    here, there = (make_trainer(model=tiny_model(family).to(device)) for device in (CPU, gpu))
    ours, theirs = here.accumulate(make_batch()), there.accumulate(make_batch())
    assert abs(ours.loss - theirs.loss) < 1e-4
    torch.testing.assert_close(gradients(there), gradients(here), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_the_kernel_attends_as_its_documentation_says(window, heads, gpu):
    rows = pack(make_trees(alphabet=2), 4096)
    for row in rows:
        torch.manual_seed(0)
        tokens = len(row.tokens_T)
        inputs = [torch.randn(1, count, tokens, 32) for count in (heads[0], heads[1], heads[1])]
        on_gpu = [x.to(gpu, torch.bfloat16).requires_grad_() for x in inputs]
        out = fused_attention.attend_ragged(
            *on_gpu, fused_attention.arrange(row.segments, gpu), scaling=0.2, window=window
        )
        slope = torch.randn(out.shape)
        (out.float() * slope.to(gpu)).sum().backward()
        on_cpu = [x.detach().cpu().float().requires_grad_() for x in on_gpu]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fused_attention, "varlen_attn", varlen_attn)
            arranged = fused_attention.arrange(row.segments, CPU)
            expected = fused_attention.attend_ragged(*on_cpu, arranged, scaling=0.2, window=window)
        (expected * slope).sum().backward()
        assert error(out, expected) < 0.02
        for one, other in zip(on_gpu, on_cpu, strict=True):
            assert error(one.grad, other.grad) < 0.03


def error(found, expected):
    """||found - expected|| / ||expected||"""
    found, expected = found.detach().cpu().float(), expected.detach()
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("family", ["qwen3", "qwen2, windows", "llama"])
def test_in_bfloat16_one_call_and_blocks_give_the_same(family, gpu, monkeypatch):
    model, (row, *_) = tiny_model(family).to(gpu), pack(make_trees(), 4096)
    assert fused_attention.serves(gpu, torch.bfloat16, model.config)

    def logprobs():
        with torch.no_grad():
            return row_logprobs(model, row, temperature=1.0, dtype=torch.bfloat16)[0].cpu()

    one_call = logprobs()
    monkeypatch.setattr(trainer_model, "serves", lambda *_: False)
    blocks = logprobs()
    exact = row_logprobs(copy.deepcopy(model).cpu(), row, temperature=1.0, dtype=torch.float32)[0].detach()
    assert (one_call - exact).abs().mean() < 2 * (blocks - exact).abs().mean() + 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_waits_for_the_gpu_inside_a_micro_batch(dtype, gpu):
    trainer = make_trainer(model=tiny_model().to(gpu), dtype=dtype, published=dtype)
    flat = flatten(make_batch(), trainer.algorithm, max_tokens=24)
    rows = pack(flat.minibatches[0], 64)
    trainer._backward(rows[0], flat, 0.0, first=True)  # what is made once
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for row in rows:
            trainer._backward(row, flat, 0.0, first=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_in_bfloat16_goes_where_that_in_float32_goes(gpu, tmp_path):
    here = make_trainer(model=tiny_model())
    there = make_trainer(model=tiny_model().to(gpu), dtype=torch.bfloat16, published=torch.bfloat16)
    ours, theirs = here.accumulate(make_batch()), there.accumulate(make_batch())
    assert abs(ours.loss - theirs.loss) < 0.05
    cosine = torch.cosine_similarity(gradients(here), gradients(there), dim=0)
    assert cosine > 0.98
    assert there.step(make_batch(), rejected_dir=tmp_path).version == 1
