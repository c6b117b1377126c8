"""Attention over a packed row: each segment sees itself causally and all of its prefix. In a layer with a
window of W tokens, a query sees only the last W of these tokens, itself included.

Segments of similar length are padded together into blocks. So one attention call serves many short sequences,
and long sequences are padded little. Padding cannot leak. A padded key is masked, or stands behind every real
query of its segment. The output of a padded query is thrown away.

Shape suffixes: T = tokens of the row, R = segments of a block, Q = queries of its longest, P = keys of its
longest prefix, H = heads, D = head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor
from torch.nn.functional import embedding
from transformers import AttentionInterface

from millrace.devices.gpu import on
from millrace.trainer.batch.packing import RowSegment
from millrace.trainer.kernels import fused_attention
from millrace.trainer.kernels.fused_attention import Ragged, arrange, attend_ragged

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


NAME = "millrace_packed"

# The cost of an attention call beyond its arithmetic, in score entries (query-key pairs). Padding pays up to
# this number. Measured on one CPU core.
CALL_OVERHEAD = 10_000


@dataclass(frozen=True, slots=True)
class Block:
    """Segments attended in one call. `mask` is None if attention is plain causal."""

    queries_RQ: torch.Tensor
    keys_RK: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """The blocks of a row, the same blocks for layers with a window, and the place of each of the row's
    tokens in their concatenated outputs. Or `ragged` and no block: one call without padding. `group`: the
    ranks that share the row's tokens; None: this rank has all tokens."""

    blocks: tuple[Block, ...]
    windowed: tuple[Block, ...]
    outputs_T: torch.Tensor
    group: ProcessGroup | None = None
    ragged: Ragged | None = None


def plan(
    segments: Sequence[RowSegment],
    device: torch.device,
    *,
    window: int | None = None,
    group: ProcessGroup | None = None,
    ragged: bool = False,
) -> RowBlocks:
    """Arrange the segments of a row, which cover it completely, into blocks on `device`. `window`: of the
    layers with a window. `ragged`: arrange them into one call; `ragged.serves` says whether the kernel
    can."""
    if ragged:
        return RowBlocks((), (), torch.empty(0), group, arrange(segments, device))
    blocks, windowed = [], []
    outputs, offset = np.zeros(sum(segment.length for segment in segments), dtype=np.int64), 0
    for members in _buckets(segments):
        blocks.append(_block(members, device, None))
        longest = max(len(segment.prefix_P) + segment.length for segment in members)
        fits = window is None or longest <= window
        windowed.append(blocks[-1] if fits else _block(members, device, window))
        width = max(segment.length for segment in members)
        for segment in members:
            rows = slice(segment.start, segment.start + segment.length)
            outputs[rows] = np.arange(offset, offset + segment.length)
            offset += width
    return RowBlocks(tuple(blocks), tuple(windowed), on(device, outputs), group)


def _buckets(segments: Sequence[RowSegment]) -> list[list[RowSegment]]:
    """Group segments so that padding costs less than the calls it saves. Longest first."""
    buckets: list[list[RowSegment]] = []
    for masked in (False, True):
        length = prefix = unpadded = 0
        kind = [segment for segment in segments if bool(len(segment.prefix_P)) == masked]
        for index, segment in enumerate(sorted(kind, key=lambda r: (-r.length, -len(r.prefix_P), r.start))):
            entries = segment.length * (len(segment.prefix_P) + segment.length)
            prefix = max(prefix, len(segment.prefix_P))
            padded = (len(buckets[-1]) + 1) * length * (prefix + length) if index else 0
            if index == 0 or padded - unpadded - entries > CALL_OVERHEAD:
                buckets.append([])
                length, prefix, unpadded = segment.length, len(segment.prefix_P), 0
            unpadded += entries
            buckets[-1].append(segment)
    return buckets


def _block(segments: Sequence[RowSegment], device: torch.device, window: int | None) -> Block:
    width = max(segment.length for segment in segments)
    start = np.array([segment.start for segment in segments])[:, None]
    length = np.array([segment.length for segment in segments])[:, None]
    offsets = np.arange(width)[None, :]
    queries = start + np.where(offsets < length, offsets, 0)
    prefix_length_R = np.array([len(segment.prefix_P) for segment in segments])
    prefixes = np.zeros((len(segments), int(prefix_length_R.max())), np.int64)
    for row, segment in zip(prefixes, segments, strict=True):
        row[: len(segment.prefix_P)] = segment.prefix_P
    mask = _mask(prefix_length_R, width, window)
    return Block(
        on(device, queries),
        on(device, np.concatenate([prefixes, queries], axis=1)),
        None if mask is None else on(device, mask[:, None]),
    )


def _mask(prefix_length_R: NDArray[np.int64], width: int, window: int | None) -> NDArray[np.bool_] | None:
    """The keys that each query sees, (R or 1, Q, P + Q); None: plain causal. Positions are counted from the
    start of a segment, so positions of its prefix are negative."""
    prefix_width = int(prefix_length_R.max())
    if not prefix_width and window is None:
        return None
    if (prefix_length_R == prefix_width).all():
        prefix_length_R = prefix_length_R[:1]
    prefix_RP = np.arange(prefix_width) - prefix_length_R[:, None]
    position_Q = np.arange(width)
    shape = (len(prefix_RP), width, prefix_width)
    prefix_RQP = np.broadcast_to(prefix_RP[:, None] < 0, shape)
    behind_QQ = position_Q[:, None] - position_Q
    causal_QQ = behind_QQ >= 0
    if window is not None:
        prefix_RQP = prefix_RQP & (position_Q[:, None] - prefix_RP[:, None] < window)
        causal_QQ &= behind_QQ < window
    causal_RQQ = np.broadcast_to(causal_QQ, (len(prefix_RP), width, width))
    return np.concatenate([prefix_RQP, causal_RQQ], axis=2)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    packed: RowBlocks,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function given to transformers. `softcap`: a score s is softcap * tanh(s / softcap).
    `s_aux`: attention sinks, one more score of each head's queries, whose weight is given to no value.

    Shapes:
        query       (1, H, T, D)
        key, value  (1, H_kv, T, D)
        s_aux       (H,)
        returns     (1, T, H, D)
        If the row is divided among ranks, T are the tokens of this rank.
    """
    if isinstance(s_aux, DTensor):
        s_aux = s_aux.to_local()
    if packed.group is not None:
        from millrace.trainer.ranks.rank_exchange import own_heads, split_heads, split_tokens

        s_aux = None if s_aux is None else own_heads(s_aux, packed.group)
        query, key, value = (split_heads(x, packed.group) for x in (query, key, value))
    if packed.ragged is not None:
        attended = attend_ragged(query, key, value, packed.ragged, scaling=scaling, window=sliding_window)
    else:
        blocks = packed.blocks if sliding_window is None else packed.windowed
        attended = _attend_blocks(query, key, value, blocks, packed.outputs_T, scaling, softcap, s_aux)
    return attended if packed.group is None else split_tokens(attended, packed.group), None


def _attend_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: Sequence[Block],
    outputs_T: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    _, heads, tokens, dim = query.shape
    queries, keys = [block.queries_RQ for block in blocks], [block.keys_RK for block in blocks]
    gathered = _gather(query, queries), _gather(key, keys), _gather(value, keys)
    outputs = []
    for block, query_R, key_R, value_R in zip(blocks, *gathered, strict=True):
        if softcap is not None or sinks_H is not None:
            out = composed_attention(query_R, key_R, value_R, block.mask, scaling, softcap, sinks_H)
        else:
            out = fused_attention.attention(query_R, key_R, value_R, block.mask, scaling)
        outputs.append(out.transpose(1, 2).reshape(-1, heads * dim))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return embedding(outputs_T, joined).view(1, tokens, heads, dim)


def _gather(x: torch.Tensor, indices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """(1, H, T, D) -> (R, H, K, D) of each block. The backward of `embedding` sums repeats in a fixed order
    on every device; the backward of indexing does not. One call, because each backward writes a whole row."""
    x_T = x[0].transpose(0, 1).flatten(1)
    gathered = embedding(torch.cat([index.flatten() for index in indices]), x_T)
    by_block = gathered.split([index.numel() for index in indices])
    heads = (x.shape[1], x.shape[3])
    return [x.view(*index.shape, *heads).transpose(1, 2) for x, index in zip(by_block, indices, strict=True)]


AttentionInterface.register(NAME, packed_attention)


def composed_attention(
    query_R: torch.Tensor,
    key_R: torch.Tensor,
    value_R: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with capped scores or sinks. All scores, (R, H, Q, K), are kept until the backward pass, at
    least in float32."""
    groups = query_R.shape[1] // key_R.shape[1]
    key_R, value_R = (x.repeat_interleave(groups, dim=1) for x in (key_R, value_R))
    if mask is None:
        mask = torch.ones(query_R.shape[2], key_R.shape[2], dtype=torch.bool, device=query_R.device).tril()
    with torch.autocast(query_R.device.type, enabled=False):
        wide = torch.promote_types(query_R.dtype, torch.float32)
        scores = query_R.to(wide) @ key_R.to(wide).mT
        capped = scores * scaling if softcap is None else softcap * torch.tanh(scores * (scaling / softcap))
        seen = capped.masked_fill(~mask, -torch.inf)
        if sinks_H is not None:
            sinks = sinks_H.to(wide)[:, None, None].expand(*seen.shape[:3], 1)
            seen = torch.cat([seen, sinks], dim=-1)
        weights = seen.softmax(-1)[..., : key_R.shape[2]]
        return weights.to(value_R.dtype) @ value_R
