"""Attention by torch's fused kernels: of segments of a CPU in bfloat16, which keep less for the backward
pass than autocast keeps, and of a whole packed row in one call without padding, on GPUs.

Each segment attends to a gathered list of keys: the keys of its prefix, then its own keys. The kernel's mask
is aligned at the end of the keys, so a query sees the prefix and every earlier token of the segment. A prefix
that several segments share is gathered for each segment, and the gather sums its gradients.

Shape suffixes: T = tokens of the row, R = segments, H = heads, Q = queries, K = keys, of all segments where a
row is one call, D = head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any, cast

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import embedding, scaled_dot_product_attention

from millrace.core.supported import SINKS
from millrace.devices.gpu import has_flash, on
from millrace.devices.operators import OPERATORS, agrees, define
from millrace.trainer.batch.packing import RowSegment

Tensor = torch.Tensor


def computes_narrow(x: Tensor) -> bool:
    """Whether matmuls of `x` are rounded, by autocast on a CPU."""
    return x.device.type == "cpu" and torch.is_autocast_enabled("cpu")


def attention(query_R: Tensor, key_R: Tensor, value_R: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Attention of (R, H, Q, D) to (R, H_kv, K, D), plain causal without a mask. Autocast on a CPU rounds
    queries, keys, values and the result; scores and sums are then float32."""
    if not computes_narrow(query_R):
        return _attend(query_R, key_R, value_R, mask, scaling)
    dtype = torch.get_autocast_dtype("cpu")
    out: Tensor = _Attention.apply(query_R.to(dtype), key_R.to(dtype), value_R.to(dtype), mask, scaling)
    return out


class _Attention(torch.autograd.Function):
    """In float32, because torch's backward pass takes four times as long in bfloat16. It is computed again in
    the backward pass, so that float32 copies are not kept."""

    @staticmethod
    def forward(
        ctx: Any, query_R: Tensor, key_R: Tensor, value_R: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor:
        ctx.save_for_backward(query_R, key_R, value_R, mask)
        ctx.scaling = scaling
        with torch.autocast("cpu", enabled=False):
            return _attend(query_R.float(), key_R.float(), value_R.float(), mask, scaling).to(query_R.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *narrow, mask = ctx.saved_tensors
        query_R, key_R, value_R = wide = [x.float().requires_grad_() for x in narrow]
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            out = _attend(query_R, key_R, value_R, mask, ctx.scaling)
        slopes = torch.autograd.grad(out, wide, grads[0].float())
        return *(slope.to(x.dtype) for slope, x in zip(slopes, narrow, strict=True)), None, None


def _attend(query_R: Tensor, key_R: Tensor, value_R: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    grouped = key_R.shape[1] != query_R.shape[1]
    return scaled_dot_product_attention(
        query_R, key_R, value_R, mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )


# ---------------------------------------------------------------- a whole row, on GPUs


# From torch 2.12 on an argument says that several query heads share a key head.
GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


@dataclass(frozen=True, slots=True)
class Ragged:
    """The segments of a row. `query_ends` and `key_ends`, (R + 1,) int32, begin with 0. `keys_K` is None if
    no segment has a prefix: then the keys are the row. `repeats`: of each token where it stands in `keys_K`,
    as in `repeat_sums`."""

    query_ends: torch.Tensor
    key_ends: torch.Tensor
    keys_K: torch.Tensor | None
    repeats: tuple[torch.Tensor, torch.Tensor] | None
    longest_query: int
    longest_key: int


def serves(device: torch.device, dtype: torch.dtype, config: Any) -> bool:
    """Whether the kernel can compute the attention of `config`, a Hugging Face model's: without capped
    scores and sinks."""
    if getattr(config, "attn_logit_softcapping", None) or config.model_type in SINKS:
        return False
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return has_flash(device, dtype, head_dim)


def arrange(segments: Sequence[RowSegment], device: torch.device) -> Ragged:
    """Arrange the segments of a row, which cover it in their order."""
    lengths = [segment.length for segment in segments]
    num_keys = [len(segment.prefix_P) + segment.length for segment in segments]
    keys_K = np.concatenate(
        [
            keys
            for segment in segments
            for keys in (segment.prefix_P, np.arange(segment.start, segment.start + segment.length))
        ]
    )
    gathers, repeats = len(keys_K) > sum(lengths), None
    if gathers and sums_repeats(device):
        order_K = np.argsort(keys_K, kind="stable")
        begins = np.searchsorted(keys_K[order_K], np.arange(sum(lengths) + 1))
        repeats = on(device, order_K.astype(np.int32)), on(device, begins.astype(np.int32))
    return Ragged(
        query_ends=on(device, np.cumsum([0, *lengths]).astype(np.int32)),
        key_ends=on(device, np.cumsum([0, *num_keys]).astype(np.int32)),
        keys_K=on(device, keys_K) if gathers else None,
        repeats=repeats,
        longest_query=max(lengths),
        longest_key=max(num_keys),
    )


def attend_ragged(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row: Ragged,
    *,
    scaling: float,
    window: int | None,
) -> torch.Tensor:
    """Shapes as `attention.packed_attention`. `window`: tokens that a query sees, itself included."""
    query_T, key_K, value_K = (x.squeeze(0).transpose(0, 1).to(value.dtype) for x in (query, key, value))
    if row.keys_K is not None:
        key_K, value_K = (_gathered(x.flatten(1), row).unflatten(1, x.shape[1:]) for x in (key_K, value_K))
    out = varlen_attn(
        query_T,
        key_K,
        value_K,
        *(row.query_ends, row.key_ends, row.longest_query, row.longest_key),
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **GROUPED,
    )
    assert isinstance(out, torch.Tensor)  # without further results
    return out[None]


def _gathered(x_TC: Tensor, row: Ragged) -> Tensor:
    """The rows of all keys. Repeats are summed in a fixed order."""
    if row.repeats is not None:
        return cast(Tensor, _Gather.apply(x_TC, row))
    assert row.keys_K is not None
    return embedding(row.keys_K, x_TC)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, row: Ragged) -> Tensor:
        ctx.repeats = row.repeats
        assert row.keys_K is not None
        return x_TC.index_select(0, row.keys_K)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return OPERATORS.repeat_sums(grads[0], *ctx.repeats), None


def repeat_sums(rows_KC: Tensor, order_K: Tensor, begins_T: Tensor) -> Tensor:
    """(T, C): of each token the sum of its rows, in their order. They are the rows `order_K` from the token's
    beginning to the next token's; `begins_T` has one number more than there are tokens."""
    sums = torch.segment_reduce(rows_KC[order_K].float(), "sum", offsets=begins_T.long(), axis=0)
    return sums.to(rows_KC.dtype)


define(
    "repeat_sums(Tensor rows, Tensor order, Tensor begins) -> Tensor",
    "millrace.trainer.kernels.trainer_tiles",
    shape=lambda rows, order, begins: rows.new_empty((len(begins) - 1, rows.shape[1])),
    plain=repeat_sums,
)


@cache
def sums_repeats(device: torch.device) -> bool:
    """Whether `repeat_sums` can sum there: on a GPU if Triton runs, and a small example comes out right."""
    return device.type != "cuda" or sums_right(OPERATORS.repeat_sums, device)


def sums_right(sums: Callable[..., Tensor], device: torch.device) -> bool:
    def gap() -> float:
        keys_K = torch.tensor([2, 0, 1, 2, 0, 2], device=device)
        rows_KC = torch.arange(6.0 * 600, device=device).view(6, 600).bfloat16()
        begins = torch.tensor([0, 2, 3, 6], dtype=torch.int32, device=device)
        expected = torch.zeros((3, 600), device=device).index_add_(0, keys_K, rows_KC.float())
        found = sums(rows_KC, keys_K.argsort(stable=True).int(), begins)
        return ((found.float() - expected).abs() / expected.clamp_min(1.0)).max().item()

    return agrees("gradients of shared keys are summed", gap, 2**-6)  # bfloat16 rounds
