"""Attention that no fused kernel computes, composed of plain operations: with capped scores, or with sinks.

Shape suffixes: R = segments of a block, H = heads, Q = queries, K = keys, D = head dimension.
"""

from __future__ import annotations

import torch


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
