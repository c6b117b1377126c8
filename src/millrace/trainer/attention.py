"""Attention over a packed row: each stretch sees itself causally and all of its prefix.

Stretches of similar length are padded together into blocks, so that short sequences cost one attention call
for many of them and long ones are not padded much. Padding cannot leak: a padded key stands behind
every real query of its stretch, or is masked; a padded query is computed and thrown away.

Shape suffixes: T = tokens of the row, R = stretches of a block, Q = queries of its longest, P = keys of its
longest prefix, H = heads, D = head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import AttentionInterface

from millrace.trainer.packing import Stretch

NAME = "millrace_packed"

# What an attention call costs beyond its arithmetic, in score entries (query-key pairs): padding is
# worth it up to here. Measured on one CPU core.
CALL_OVERHEAD = 10_000


@dataclass(frozen=True, slots=True)
class Block:
    """Stretches attended in one call. `mask` is None for stretches without a prefix: plain causal."""

    queries_RQ: torch.Tensor
    keys_RK: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """The blocks of a row, and where each of the row's tokens lies in their concatenated outputs."""

    blocks: tuple[Block, ...]
    outputs_T: torch.Tensor


def plan(stretches: Sequence[Stretch], device: torch.device) -> RowBlocks:
    """Arrange the stretches of a row, which cover it completely, into blocks on `device`."""
    blocks, outputs, offset = [], np.zeros(sum(stretch.length for stretch in stretches), dtype=np.int64), 0
    for members in _buckets(stretches):
        blocks.append(_block(members, device))
        width = max(stretch.length for stretch in members)
        for stretch in members:
            rows = slice(stretch.start, stretch.start + stretch.length)
            outputs[rows] = np.arange(offset, offset + stretch.length)
            offset += width
    return RowBlocks(tuple(blocks), torch.from_numpy(outputs).to(device))


def _buckets(stretches: Sequence[Stretch]) -> list[list[Stretch]]:
    """Group stretches so that padding costs less than the calls it saves. Longest first."""
    buckets: list[list[Stretch]] = []
    for masked in (False, True):
        length = prefix = own = 0
        kind = [stretch for stretch in stretches if bool(len(stretch.prefix_P)) == masked]
        for index, stretch in enumerate(sorted(kind, key=lambda r: (-r.length, -len(r.prefix_P), r.start))):
            entries = stretch.length * (len(stretch.prefix_P) + stretch.length)
            prefix = max(prefix, len(stretch.prefix_P))
            padded = (len(buckets[-1]) + 1) * length * (prefix + length) if index else 0
            if index == 0 or padded - own - entries > CALL_OVERHEAD:
                buckets.append([])
                length, prefix, own = stretch.length, len(stretch.prefix_P), 0
            own += entries
            buckets[-1].append(stretch)
    return buckets


def _block(stretches: Sequence[Stretch], device: torch.device) -> Block:
    width = max(stretch.length for stretch in stretches)
    start = np.array([stretch.start for stretch in stretches])[:, None]
    length = np.array([stretch.length for stretch in stretches])[:, None]
    own = np.arange(width)[None, :]
    queries = start + np.where(own < length, own, 0)
    prefix_length = np.array([len(stretch.prefix_P) for stretch in stretches])[:, None]
    prefix_width = int(prefix_length.max())
    if not prefix_width:
        index = torch.from_numpy(queries).to(device)
        return Block(index, index, None)
    prefixes = np.zeros((len(stretches), prefix_width), np.int64)
    for row, stretch in zip(prefixes, stretches, strict=True):
        row[: len(stretch.prefix_P)] = stretch.prefix_P
    seen = np.arange(prefix_width)[None, :] < prefix_length
    keys = np.concatenate([prefixes, queries], axis=1)
    if seen.all():
        seen = seen[:1]
    causal = own <= own.T
    mask = np.concatenate(
        [
            np.broadcast_to(seen[:, None, :], (len(seen), width, prefix_width)),
            np.broadcast_to(causal, (len(seen), width, width)),
        ],
        axis=2,
    )
    return Block(
        torch.from_numpy(queries).to(device),
        torch.from_numpy(keys).to(device),
        torch.from_numpy(mask[:, None]).to(device),
    )


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    packed: RowBlocks,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function given to transformers.

    Shapes:
        query       (1, H, T, D)
        key, value  (1, H_kv, T, D)
        returns     (1, T, H, D)
    """
    _, heads, tokens, dim = query.shape
    query_T, key_T, value_T = (_rows(x) for x in (query, key, value))
    outputs = []
    for block in packed.blocks:
        out = scaled_dot_product_attention(
            _gather(query_T, block.queries_RQ, dim),
            _gather(key_T, block.keys_RK, dim),
            _gather(value_T, block.keys_RK, dim),
            attn_mask=block.mask,
            is_causal=block.mask is None,
            scale=scaling,
            enable_gqa=key.shape[1] != heads,
        )
        outputs.append(out.transpose(1, 2).reshape(-1, heads * dim))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return embedding(packed.outputs_T, joined).view(1, tokens, heads, dim), None


def _rows(x: torch.Tensor) -> torch.Tensor:
    """(1, H, T, D) -> (T, H * D)"""
    return x[0].transpose(0, 1).reshape(x.shape[2], -1)


def _gather(x_T: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    """(T, H * D) -> (R, H, K, D). `embedding`, because its backward sums repeats in a fixed order on
    every device, which that of indexing does not."""
    return embedding(index, x_T).unflatten(-1, (-1, dim)).transpose(1, 2)


AttentionInterface.register(NAME, packed_attention)
