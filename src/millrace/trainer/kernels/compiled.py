"""Norms, rotary embeddings and gates of a model as one kernel each, which torch compiles. For GPUs.

torch launches a kernel for each elementwise operation, and each reads and writes all tokens. Compiled, they
read and write once. A compiled function serves rows of every length: only the number of tokens is left open.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

Tensor = torch.Tensor
LOG = logging.getLogger(__name__)
ROTATE = "apply_rotary_pos_emb"  # a function of each family's module in transformers
INDUCTOR = "inductor"


def install_where_it_runs(model: torch.nn.Module, device: torch.device) -> None:
    """`install`, if torch can compile for `device`: this needs a C compiler and Triton."""
    try:
        x = torch.ones((4, 8), device=device, requires_grad=True)
        compiled(_gate, INDUCTOR)(torch.nn.functional.silu, x, x).sum().backward()
    except Exception as error:  # the compilers raise errors of every kind
        LOG.warning("norms, rotary embeddings and gates are not compiled: %s", error)
        return
    LOG.info("norms, rotary embeddings and gates are compiled")
    install(model)


def install(model: torch.nn.Module, backend: Any = INDUCTOR) -> None:
    """Replace the norms, gates and rotary embeddings of `model` by compiled ones.

    Rotary embeddings are a function of the family's module, so they change for all models of this process.
    On a CPU they stay as they are.
    """
    for module in model.modules():
        kind = type(module)
        if kind.__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, module, compiled(kind.forward, backend))
        elif hasattr(module, "gate_proj") and hasattr(module, "act_fn"):
            module.forward = partial(_gated, module, compiled(_gate, backend))
        family = sys.modules[kind.__module__]
        rotate = getattr(family, ROTATE, None)
        if rotate is not None and not isinstance(rotate, partial):
            setattr(family, ROTATE, partial(_rotate, rotate, backend))


@cache
def compiled(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    """For every number of tokens. Other sizes are constants of the code; each size has code of its own."""
    return torch.compile(function, dynamic=False, backend=backend)


def _any_length(x: Tensor, dim: int) -> Tensor:
    torch._dynamo.maybe_mark_dynamic(x, dim)
    return x


def _norm(norm: Any, forward: Callable[..., Tensor], x: Tensor) -> Tensor:
    return forward(norm, _any_length(x.reshape(-1, x.shape[-1]), 0)).view(x.shape)


def _gate(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    return activation(gate) * up


def _gated(mlp: Any, gate: Callable[..., Tensor], x: Tensor) -> Tensor:
    parts = (_any_length(projection(x).flatten(0, -2), 0) for projection in (mlp.gate_proj, mlp.up_proj))
    found: Tensor = mlp.down_proj(gate(mlp.act_fn, *parts).unflatten(0, x.shape[:-1]))
    return found


def _rotate(
    rotate: Callable[..., Any], backend: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any
) -> Any:
    """q, k (1, H, T, D), cos, sin (1, T, D)."""
    if backend == INDUCTOR and not q.is_cuda:
        return rotate(q, k, cos, sin, *more)
    places = ((q, 2), (k, 2), (cos, 1), (sin, 1))
    return compiled(rotate, backend)(*(_any_length(x.view_as(x), dim) for x, dim in places), *more)
