"""The embedding of a CPU. Its gradient has a row for each token, and none for the rest of the vocabulary."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from millrace.trainer.kernels.row_threads import IN_TURN, turns_of

Tensor = torch.Tensor
SCALE = "embed_scale"  # of Gemma's embeddings


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight_VH: torch.nn.Parameter, padding: int | None) -> Tensor:
        ctx.ids, ctx.weight, ctx.padding = ids, weight_VH, padding
        return F.embedding(ids, weight_VH)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight_VH, ids, grad_TH = ctx.weight, ctx.ids.flatten(), grads[0].flatten(0, -2)
        if ctx.padding is not None:
            ids, grad_TH = ids[ids != ctx.padding], grad_TH[ids != ctx.padding]
        if (turns := turns_of(weight_VH)) is not None:
            turns.later(lambda: weight_VH.grad.index_add_(0, ids, grad_TH))
            return None, None, None
        return None, torch.zeros_like(weight_VH).index_add_(0, ids, grad_TH), None


def install(model: PreTrainedModel) -> None:
    """Give this gradient to the embedding of `model`. The output projection then adds to sums itself, because
    both gradients of a tied weight have to be added in a fixed order."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    known = type(embedding) is torch.nn.Embedding or hasattr(embedding, SCALE)
    if known:
        embedding.forward = partial(_forward, embedding)
        setattr(embedding.weight, IN_TURN, True)
    if head.weight is not embedding.weight:
        setattr(head.weight, IN_TURN, True)


def _forward(layer: torch.nn.Embedding, ids: Tensor) -> Tensor:
    out: Tensor = _Lookup.apply(ids, layer.weight, layer.padding_idx)
    scale = getattr(layer, SCALE, None)
    return out if scale is None else out * scale.to(out.dtype)
