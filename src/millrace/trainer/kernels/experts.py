"""The experts of a mixture in bfloat16 on GPUs: all of a layer in two grouped matmuls, without the host.

transformers has grouped matmuls too, but not in autocast's format: with float32 weights its sums would be
float32, which no GPU groups. Everything else of a mixture, and every other device, is transformers'.

Shape suffixes: T = tokens, K = experts of a token, M = T K rows, sorted by expert, H = hidden size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.functional import embedding

from millrace.devices.grouped import group_ends, grouped_linear, has_grouped

Tensor = torch.Tensor


def install(model: torch.nn.Module) -> None:
    """Where `model` has experts as Qwen3's mixtures or gpt-oss do, they compute in groups."""
    for module in model.modules():
        if (
            hasattr(module, "gate_up_proj")
            and hasattr(module, "down_proj")
            and hasattr(module, "num_experts")
        ):
            module.forward = partial(_forward, module)


def _forward(experts: Any, hidden_TH: Tensor, experts_TK: Tensor, shares_TK: Tensor) -> Tensor:
    device = hidden_TH.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_TH.dtype
    shapes = [experts.gate_up_proj.shape, experts.down_proj.shape]
    if has_grouped(hidden_TH.device, dtype, shapes):
        return grouped_experts(experts, hidden_TH, experts_TK, shares_TK, dtype)
    found: Tensor = type(experts).forward(experts, hidden_TH, experts_TK, shares_TK)
    return found


def grouped_experts(
    experts: Any, hidden_TH: Tensor, experts_TK: Tensor, shares_TK: Tensor, dtype: torch.dtype
) -> Tensor:
    """(T, H): the sum of each token's experts, weighed by its shares. Matmuls are computed in `dtype`."""
    chosen_M, order_M = experts_TK.flatten().sort(stable=True)
    ends = group_ends(chosen_M, experts.num_experts)
    # `embedding`, because its backward sums repeats in a fixed order.
    rows_MH = embedding(order_M // experts_TK.shape[1], hidden_TH.to(dtype))

    def linear(x_MI: Tensor, name: str) -> Tensor:
        weight, bias = getattr(experts, name).to(dtype), getattr(experts, f"{name}_bias", None)
        out_MO = grouped_linear(x_MI, weight.mT if experts.is_transposed else weight, ends)
        return out_MO if bias is None else out_MO + embedding(chosen_M, bias.to(dtype))

    outputs_MH = linear(experts._apply_gate(linear(rows_MH, "gate_up_proj")), "down_proj")
    outputs_TKH = embedding(order_M.argsort(), outputs_MH).unflatten(0, experts_TK.shape)
    return (outputs_TKH * shares_TK[..., None]).sum(1).to(hidden_TH.dtype)
