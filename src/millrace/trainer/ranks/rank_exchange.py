"""Exchanges of ranks inside a forward pass, with the gradient of every exchange.

Long rows (`trainer.sequence`): each of S ranks has a block of a row's tokens. Attention needs all tokens, but
only some of the heads. So ranks swap tokens for heads before attention, and heads for tokens after it
(DeepSpeed-Ulysses, arXiv:2309.14509). Divided matrices (`trainer.tensor`): arXiv:1909.08053, figure 3.

Shape suffixes: H = heads of this rank's matrices, T = tokens of the row, t = T / S, h = H / S, D = size of a
head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.distributed import ProcessGroup


def split_heads(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """(1, H, t, D) -> (1, h, T, D): all tokens of some heads."""
    _, _, tokens, dim = x.shape
    blocks_SHTD = _Swap.apply(x.reshape(group.size(), -1, tokens, dim), group)
    return blocks_SHTD.transpose(0, 1).reshape(1, -1, group.size() * tokens, dim)


def split_tokens(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """(1, T, h, D) -> (1, t, H, D): all heads of some tokens."""
    _, _, heads, dim = x.shape
    blocks_STHD = _Swap.apply(x.reshape(group.size(), -1, heads, dim), group)
    return blocks_STHD.transpose(0, 1).reshape(1, -1, group.size() * heads, dim)


def own_heads(x_H: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """(H,) -> (h,): of the heads that `split_heads` gives this rank."""
    return x_H.chunk(group.size())[group.rank()]


class _Same(torch.autograd.Function):
    """`x`, which is the same on every rank. Each rank computes a summand of the result, so gradients are
    summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(grads[0], ctx.group), None


class _Total(torch.autograd.Function):
    """The sum of every rank's `x`. The result is the same on every rank, and so is the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _Swap(torch.autograd.Function):
    """Block s goes to rank s; the gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _swap(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _swap(grads[0], ctx.group), None


class _Joined(torch.autograd.Function):
    """Every rank's `x` side by side. Each rank computes a summand of the gradient, so gradients are
    summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        blocks = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
        distributed.all_gather(blocks, x.contiguous(), group=group)
        return torch.cat(blocks, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(grads[0], ctx.group).chunk(ctx.group.size(), dim=-1)[ctx.group.rank()], None


same, total, joined = _Same.apply, _Total.apply, _Joined.apply


def _sum(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(x, group=group)
    return x


def _swap(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    distributed.all_to_all_single(received, x, group=group)
    return received
