"""The norm of all gradients together, and the clip to it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from millrace.trainer.ranks.mesh import ALONE, Ranks, local


def grad_norm(parameters: Iterable[torch.nn.Parameter], ranks: Ranks = ALONE) -> torch.Tensor:
    """Euclidean norm of all gradients of all ranks; not finite if a gradient is not. The same on every
    rank."""
    grads = [p.grad for p in parameters if p.grad is not None and (ranks.tensor_index == 0 or _divided(p))]
    norm = torch.nn.utils.get_total_norm([local(grad) for grad in grads])
    if ranks.world == 1:
        return norm
    return torch.tensor(math.hypot(*ranks.gather(norm.item())), dtype=norm.dtype, device=norm.device)


def _divided(parameter: Any) -> bool:
    """Whether the ranks of a tensor group have different blocks of `parameter`."""
    place = parameter.placements[-1]
    return not place.is_replicate()


def clip_gradients(parameters: Iterable[torch.nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their norm is at most `max_norm`."""
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
