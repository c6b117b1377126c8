"""Layers of a GPU: compiled between matmuls, the experts of a mixture in groups, FlashAttention 3.

torch launches a kernel for each elementwise operation, and each reads and writes all tokens. Norms, rotary
embeddings and gates are compiled, one kernel each: they read and write once. In layers of a known form the
sum before a norm, the heads' norms and the rounding for a matmul are in these kernels, too. A compiled
function serves rows of every length: only the number of tokens is left open.

In bfloat16 all experts of a layer are computed in two grouped matmuls, without the host. transformers has
grouped matmuls too, but not in autocast's format: with float32 weights its sums would be float32, which no
GPU groups. Everything else of a mixture is transformers'.

Shape suffixes: T = tokens, K = experts of a token, M = T K rows, sorted by expert, H = hidden size.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import embedding
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from millrace.devices.matmul import group_ends, grouped_linear, has_grouped
from millrace.trainer.kernels.fp8_matmul import QUANTISE, quantised
from millrace.trainer.kernels.products import SAME_INPUT, products

Tensor = torch.Tensor
LOG = logging.getLogger(__name__)
ROTATE = "apply_rotary_pos_emb"  # a function of each family's module in transformers
INDUCTOR = "inductor"


def install_where_it_runs(model: torch.nn.Module, device: torch.device) -> None:
    """`install_compiled`, if torch can compile for `device`: this needs a C compiler and Triton."""
    try:
        x = torch.ones((4, 8), device=device, requires_grad=True)
        compiled(_gate, INDUCTOR)(torch.nn.functional.silu, x, x).sum().backward()
    except Exception as error:  # the compilers raise errors of every kind
        LOG.warning("norms, rotary embeddings and gates are not compiled: %s", error)
        return
    LOG.info("norms, rotary embeddings and gates are compiled")
    install_compiled(model)


def install_compiled(model: torch.nn.Module, backend: Any = INDUCTOR) -> None:
    """Replace the norms, gates and rotary embeddings of `model` by compiled ones, and layers of a known form
    by fewer and larger parts.

    Rotary embeddings are a function of the family's module, so they change for all models of this process.
    On a CPU they stay as they are.
    """
    for module in model.modules():
        kind = type(module)
        if kind.__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, module, compiled(kind.forward, backend))
        elif hasattr(module, "gate_proj") and hasattr(module, "act_fn"):
            module.forward = partial(_gated, module, compiled(_gate, backend))
            setattr(module, SAME_INPUT, ("gate_proj", "up_proj"))
        if hasattr(module, QUANTISE):
            setattr(module, QUANTISE, partial(_quantised, compiled(quantised, backend)))
        family = sys.modules[kind.__module__]
        rotate = getattr(family, ROTATE, None)
        if rotate is not None and not isinstance(rotate, partial):
            setattr(family, ROTATE, partial(_rotate, rotate, backend))
    for layer in model.modules():
        if type(layer).__name__ in KNOWN_LAYERS:
            _install_layer(layer, backend)


@cache
def compiled(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    """For every number of tokens. Other sizes are constants of the code; each size has code of its own."""
    return torch.compile(function, dynamic=False, backend=backend)


def _any_length(x: Tensor, dim: int) -> Tensor:
    torch._dynamo.maybe_mark_dynamic(x, dim)
    return x


def _norm(norm: Any, forward: Callable[..., Tensor], x: Any) -> Tensor:
    """`x`: a tensor, or two that are added."""
    x = x[0] + x[1] if isinstance(x, tuple) else x
    return forward(norm, _any_length(x.reshape(-1, x.shape[-1]), 0)).view(x.shape)


def _quantised(quantise: Callable[..., tuple[Tensor, Tensor]], rows: Tensor) -> tuple[Tensor, Tensor]:
    return quantise(_any_length(rows.view_as(rows), 0))


def _gate(activation: Callable[[Tensor], Tensor], *parts: Tensor) -> Tensor:
    gate, up = parts if len(parts) == 2 else parts[0].chunk(2, -1)
    return activation(gate) * up


def _gated(mlp: Any, gate: Callable[..., Tensor], x: Tensor) -> Tensor:
    parts = products((mlp.gate_proj, mlp.up_proj), x)
    product = gate(mlp.act_fn, *(_any_length(part.flatten(0, -2), 0) for part in parts))
    found: Tensor = mlp.down_proj(product.unflatten(0, x.shape[:-1]))
    return found


def _rotate(
    rotate: Callable[..., Any], backend: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any
) -> Any:
    """q, k (1, H, T, D), cos, sin (1, T, D)."""
    if backend == INDUCTOR and not q.is_cuda:
        return rotate(q, k, cos, sin, *more)
    places = ((q, 2), (k, 2), (cos, 1), (sin, 1))
    return compiled(rotate, backend)(*(_any_length(x.view_as(x), dim) for x, dim in places), *more)


KNOWN_LAYERS = tuple(
    f"{family}DecoderLayer" for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "SmolLM3")
)
"""x + attention(norm(x)), and of this x + mlp(norm(x))"""
ADDS = "adds"  # attribute of a layer that gives its sum, and not two tensors


def _install_layer(layer: Any, backend: Any) -> None:
    attn = layer.self_attn
    rotate = getattr(sys.modules[type(attn).__module__], ROTATE).args[0]
    layer.forward = partial(_layer_forward, layer, backend)
    attn.forward = partial(
        _attention_forward, attn, backend, rotate if getattr(attn, "use_rope", True) else None
    )
    setattr(attn, SAME_INPUT, ("q_proj", "k_proj", "v_proj"))


def _layer_forward(layer: Any, backend: Any, x: Any, *, position_embeddings: Any, **options: Any) -> Any:
    """All between two matmuls is one compiled function. `x`: the residual stream, or two tensors of which it
    is the sum. The next norm adds, unless the input of each layer is kept (`ADDS`)."""
    first, second = layer.input_layernorm, layer.post_attention_layernorm
    stream = x if isinstance(x, tuple) else (x,)
    dtype = matmul_dtype(stream[0])
    if len(stream) == 1:
        normed = compiled(_normed, backend)(type(first).forward, first, dtype, *map(_any_row, stream))
    else:
        x, normed = compiled(_added, backend)(type(first).forward, first, dtype, *map(_any_row, stream))
    attended, _ = layer.self_attn(normed, position_embeddings, **options)
    dtype = dtype if hasattr(layer.mlp, SAME_INPUT) else x.dtype  # experts round on their own
    x, normed = compiled(_added, backend)(
        type(second).forward, second, dtype, _any_row(x), _any_row(attended)
    )
    more = layer.mlp(normed)
    return x + more if hasattr(layer, ADDS) else (x, more)


def take_apart(model: torch.nn.Module) -> None:
    """Undo `install_compiled` in layers of a known form: each module computes, and can be looked at."""
    for module in model.modules():
        vars(module).pop(SAME_INPUT, None)
        if type(module).__name__ in KNOWN_LAYERS:
            for each in (module, module.self_attn):
                vars(each).pop("forward", None)


def _normed(forward: Callable[..., Tensor], norm: Any, dtype: torch.dtype, x: Tensor) -> Tensor:
    return forward(norm, x).to(dtype)


def _added(
    forward: Callable[..., Tensor], norm: Any, dtype: torch.dtype, x: Tensor, more: Tensor
) -> tuple[Tensor, Tensor]:
    x = x + more
    return x, forward(norm, x).to(dtype)


def _attention_forward(
    attn: Any,
    backend: Any,
    rotate: Callable[..., Any] | None,
    x: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    layers = (attn.q_proj, attn.k_proj, attn.v_proj)
    sizes = [layer.out_features for layer in layers]
    norms = [getattr(attn, name, None) for name in ("q_norm", "k_norm")]
    rows = map(_any_row, (*position_embeddings, *products(layers, x)))
    heads = compiled(_heads, backend)(*norms, rotate, attn.head_dim, sizes, *rows)
    attended, _ = ALL_ATTENTION_FUNCTIONS[attn.config._attn_implementation](
        attn,
        *(each.transpose(1, 2) for each in heads),
        attention_mask,
        scaling=attn.scaling,
        sliding_window=getattr(attn, "sliding_window", getattr(attn.config, "sliding_window", None)),
        **options,
    )
    return attn.o_proj(attended.flatten(2)), None


def _heads(
    q_norm: Any, k_norm: Any, rotate: Any, dim: int, sizes: list[int], cos: Tensor, sin: Tensor, *x: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(1, T, H, D) each. `x`: queries, keys and values, (1, T, H D) each, or one beside the other."""
    q, k, v = (each.unflatten(-1, (-1, dim)) for each in (x if len(x) == 3 else x[0].split(sizes, -1)))
    if q_norm is not None:
        q, k = type(q_norm).forward(q_norm, q), type(k_norm).forward(k_norm, k)
    if rotate is not None:
        q, k = rotate(q, k, cos, sin, unsqueeze_dim=2)
    return q.to(v.dtype), k.to(v.dtype), v.clone(memory_format=torch.contiguous_format)


def _any_row(x: Tensor) -> Tensor:
    """x: (1, T, ...)"""
    return _any_length(x.view_as(x), 1)


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The format of matmuls of `x`."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def install_experts(model: torch.nn.Module) -> None:
    """Where `model` has experts as Qwen3's mixtures or gpt-oss do, they compute in groups."""
    for module in model.modules():
        if (
            hasattr(module, "gate_up_proj")
            and hasattr(module, "down_proj")
            and hasattr(module, "num_experts")
        ):
            module.forward = partial(_experts_forward, module)


def _experts_forward(experts: Any, hidden_TH: Tensor, experts_TK: Tensor, shares_TK: Tensor) -> Tensor:
    dtype = matmul_dtype(hidden_TH)
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


PACKAGE = "flash_attn_interface"
TORCHS = "FlashAttention 2 of torch"
TOLERANCE = 0.1  # of attention in bfloat16, with values of size 1


@cache
def activate(device: torch.device) -> str:
    """What computes `varlen_attn` of this process from now on; the log says so, too.

    FlashAttention 3 is taken if its package is there, the GPU is a Hopper, torch can register it, and a small
    example comes out as before.
    """
    kernel = TORCHS
    if has_flash_3(device):
        kernel = "FlashAttention 3" if _activated(device) else TORCHS
    LOG.info("attention of the trainer in bfloat16: %s", kernel)
    return kernel


def has_flash_3(device: torch.device) -> bool:
    known = hasattr(attention, "activate_flash_attention_impl") and find_spec(PACKAGE) is not None
    return known and torch.cuda.get_device_capability(device)[0] == 9


def _activated(device: torch.device) -> bool:
    try:
        expected = _example(device)
        attention.activate_flash_attention_impl("FA3")
        gap = (_example(device) - expected).abs().max().item()
    except Exception as error:  # a package that was built for another torch fails in every way
        LOG.warning("FlashAttention 3 is installed and cannot be used: %s", error)
        gap = float("inf")
    if gap < TOLERANCE:
        return True
    LOG.warning("FlashAttention 3 is off by %g on an example: it is not used", gap)
    if attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()
    return False


def _example(device: torch.device) -> torch.Tensor:
    """Output and gradient of two segments, 30 and 70 tokens long, with a window."""
    generator = torch.Generator().manual_seed(0)
    inputs = (torch.randn((100, heads, 64), generator=generator) for heads in (4, 4, 4))
    q, k, v = (x.to(device, torch.bfloat16).requires_grad_() for x in inputs)
    ends = torch.tensor([0, 30, 100], dtype=torch.int32, device=device)
    out = varlen_attn(q, k, v, ends, ends, 70, 70, window_size=(20, 0))
    assert isinstance(out, torch.Tensor)
    out.float().sum().backward()
    return torch.stack([out, *(x.grad for x in (q, k, v) if x.grad is not None)]).detach().float()
