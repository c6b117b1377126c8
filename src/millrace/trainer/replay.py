"""Router replay: each sampled token is trained with the experts that the engine sampled it with.

Engine and trainer round differently, so now and then their routers choose different experts, and the trainer
would train another policy than the one that sampled. R3, arXiv:2510.11370. The experts are the engine's, and
their shares are computed from the trainer's own logits: over all experts, so every router keeps its gradient.

Shape suffixes: T = tokens of a row, E = experts of a layer, K = experts of a token, W = layers with experts
x K.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from millrace.core.errors import DataError
from millrace.devices.gpu import on
from millrace.trainer.recorded import OWN


class _Recorded(threading.local):
    """The experts of the layer that this thread computes."""

    experts_TK: torch.Tensor | None = None


_RECORDED = _Recorded()


def install_replay(model: Any) -> None:
    """Let `model` replay, if it has experts: see `replayed`. Layers must not be wrapped yet: a layer that is
    recomputed needs the recorded experts again."""
    routed = [layer for layer in model.base_model.layers if hasattr(layer.mlp, "experts")]
    routers = [layer.mlp.gate if hasattr(layer.mlp, "gate") else layer.mlp.router for layer in routed]
    for place, (layer, router) in enumerate(zip(routed, routers, strict=True)):
        router.forward = partial(_chosen, router, router.forward)
        layer.forward = partial(_layer, layer.forward, place, router.top_k)
        model.routed = len(routers), router.top_k, router.num_experts


def replayed(
    model: Any, routing_TW: NDArray[np.int32] | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """Arguments of a forward pass in which the recorded experts are used.

    Raises: DataError: another model sampled the tokens.
    """
    if routing_TW is None:
        return {}
    layers, top_k, experts = getattr(model, "routed", (0, 0, 0))
    if routing_TW.shape[1] != layers * top_k or routing_TW.max(initial=OWN) >= experts:
        raise DataError(
            f"trajectories have {routing_TW.shape[1]} recorded experts a token, up to number "
            f"{routing_TW.max(initial=OWN)}, and the model has {layers} layers with {top_k} of {experts} "
            "each: another model sampled them"
        )
    return {"routing": on(device, routing_TW.astype(np.int64))}


def _layer(forward: Any, place: int, top_k: int, *args: Any, routing: Any = None, **options: Any) -> Any:
    own = slice(place * top_k, (place + 1) * top_k)
    _RECORDED.experts_TK = None if routing is None else routing[:, own]
    try:
        return forward(*args, **options)
    finally:
        _RECORDED.experts_TK = None


def _chosen(router: Any, forward: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    logits_TE, shares_TK, experts_TK = forward(hidden)
    recorded_TK = _RECORDED.experts_TK
    if recorded_TK is None:
        return logits_TE, shares_TK, experts_TK
    experts_TK = torch.where(recorded_TK == OWN, experts_TK, recorded_TK)
    shares_TK = logits_TE.softmax(-1, dtype=torch.float32).gather(1, experts_TK)
    if getattr(router, "norm_topk_prob", True):  # gpt-oss has a softmax over these experts alone
        shares_TK = shares_TK / shares_TK.sum(-1, keepdim=True)
    return logits_TE, shares_TK.to(logits_TE.dtype), experts_TK
