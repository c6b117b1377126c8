"""Which code computes what logits say: a kernel in Triton if it runs and is right, else the general way."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from millrace.trainer.kernels.softmax import Upstream, slopes, statistics

Tensor = torch.Tensor
LOG = logging.getLogger(__name__)
TOLERANCE = 1e-4  # of float32 sums over a vocabulary in another order


@dataclass(frozen=True, slots=True)
class Softmax:
    """The two functions of `softmax`, or others that compute the same."""

    statistics: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    slopes: Callable[..., Tensor]


GENERAL = Softmax(statistics, slopes)


def softmax_on(device: torch.device, dtype: torch.dtype, softcap: float | None) -> Softmax:
    """What serves logits of `dtype` there."""
    plain = device.type == "cuda" and dtype == torch.float32 and softcap is None
    return (plain and fused(device)) or GENERAL


@cache
def fused(device: torch.device) -> Softmax | None:
    """The kernels in Triton, if Triton runs there and they agree with the general way on a small example."""
    try:
        from millrace.trainer.kernels import softmax_tiles

        kernels = Softmax(softmax_tiles.statistics, softmax_tiles.slopes)
        gap = disagreement(kernels, device)
    except Exception as error:  # Triton, its compiler and its driver raise errors of every kind
        LOG.warning("log-probs are computed without a fused kernel: %s", error)
        return None
    if not gap < TOLERANCE:
        LOG.warning("log-probs are computed without a fused kernel: it is off by %g", gap)
        return None
    LOG.info("log-probs are computed with a fused kernel")
    return kernels


def disagreement(kernels: Softmax, device: torch.device) -> float:
    """The largest distance from the general way, on random logits of tokens with and without a target."""
    generator = torch.Generator().manual_seed(0)
    logits_NV = (4 * torch.randn((5, 4_100), generator=generator)).to(device)
    targets_N = torch.tensor([0, 7, 4_099, 4_096, 3], device=device)
    chosen, entropy, normalizer = GENERAL.statistics(logits_NV.clone(), targets_N)
    of_logprobs = torch.linspace(-1.0, 1.0, 5, device=device)
    given = Upstream(targets_N, targets_N > 3, normalizer, entropy, of_logprobs, of_logprobs.flip(0))
    found = kernels.statistics(logits_NV.clone(), targets_N)
    slope, expected = (
        each.slopes(logits_NV.clone(), given, temperature=0.7, curve=1.0, dtype=torch.float32)
        for each in (kernels, GENERAL)
    )
    pairs = (*zip(found, (chosen, entropy, normalizer), strict=True), (slope, expected))
    return max((one - other).abs().max().item() for one, other in pairs)
