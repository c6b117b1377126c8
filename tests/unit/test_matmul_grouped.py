"""Experts in grouped matmuls give what one expert after another gives."""

from __future__ import annotations

import copy

import pytest
import torch
from engine_models import make_engine, make_model, make_work, prompt_of, run
from trainer_doubles import make_batch, make_trainer, tiny_model

from millrace.core.types import Sampling
from millrace.devices.matmul import group_ends, grouped_linear, has_grouped
from millrace.trainer.kernels import on_gpu

CPU = torch.device("cpu")


def test_each_row_meets_the_matrix_of_its_group():
    torch.manual_seed(0)
    x, weight = torch.randn(9, 8), torch.randn(5, 16, 8)
    groups = torch.tensor([0, 0, 2, 2, 2, 2, 3, 4, 4])  # none of group 1
    ends = group_ends(groups, 5)
    assert ends.tolist() == [2, 2, 6, 7, 9] and ends.dtype == torch.int32
    expected = torch.stack([weight[group] @ row for row, group in zip(x, groups, strict=True)])
    torch.testing.assert_close(grouped_linear(x, weight, ends), expected)


def test_a_cpu_has_no_grouped_kernel():
    assert not has_grouped(CPU, torch.bfloat16, [(4, 16, 8)])


def layers_of(model):
    return [module for module in model.modules() if hasattr(module, "gate_up_proj")]


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "qwen3_moe, a dense layer"])
def test_a_gradient_in_groups_is_that_of_one_expert_after_another(family, monkeypatch):
    gradients = []
    for grouped in (False, True):
        model = tiny_model(family, experts_implementation="eager")
        monkeypatch.setattr(on_gpu, "has_grouped", lambda *_, grouped=grouped: grouped)
        on_gpu.install_experts(model)
        trainer = make_trainer(model=model)
        loss = trainer.accumulate(make_batch()).loss
        gradients.append([torch.tensor(loss), *(p.grad for p in model.parameters())])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_in_autocast_experts_compute_in_its_format():
    (layer, *_) = layers_of(tiny_model("qwen3_moe"))
    torch.manual_seed(0)
    hidden, shares = torch.randn(12, 32), torch.rand(12, 2)
    chosen = torch.randint(4, (12, 2))
    exact = on_gpu.grouped_experts(layer, hidden, chosen, shares, torch.float32)
    rounded = on_gpu.grouped_experts(copy.deepcopy(layer), hidden, chosen, shares, torch.bfloat16)
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe", "qwen3_moe, a dense layer"])
def test_an_engine_samples_the_same_in_groups(name):
    model = make_model(name)
    works = [make_work(i, prompt_of(i, 5 + i), Sampling(max_tokens=20, ignore_eos=True)) for i in range(6)]
    plain, grouped = make_engine(model), make_engine(model)
    grouped._forward.mixture.grouped = True
    one, other = run(plain, works), run(grouped, works)
    assert {i: found[0] for i, found in one.items()} == {i: found[0] for i, found in other.items()}
    for i, (_, logprobs, _) in one.items():
        assert logprobs == pytest.approx(other[i][1], abs=1e-5)
