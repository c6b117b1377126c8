"""The norm of all gradients together, and the clip to it. For one process, in which every tensor is whole."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def grad_norm(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """Euclidean norm of all gradients together; not finite if any gradient is not."""
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def clip_gradients(parameters: Iterable[torch.nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their norm is at most `max_norm`."""
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
