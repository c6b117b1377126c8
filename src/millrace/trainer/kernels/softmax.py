"""What a block of logits says of chosen tokens, and the gradient with respect to these logits.

The general way has plain tensor operations. `softmax_tiles` computes the same in one pass, with Triton. It is
taken where it runs and is right.

Shape suffixes: N = tokens, V = vocabulary, or this rank's part of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

Tensor = torch.Tensor


class Upstream(NamedTuple):
    """Of N tokens what a backward pass is given.

    targets, own      each token's target as a column of the logits, and whether the target has a column here
    normalizer        the log-sum-exp of each token's logits
    entropy           of each token's softmax
    of_logprobs       the gradient with respect to the log-probs
    of_entropy        the gradient with respect to the entropies; None: there is none
    """

    targets: Tensor
    own: Tensor
    normalizer: Tensor
    entropy: Tensor
    of_logprobs: Tensor
    of_entropy: Tensor | None

    def of(self, tokens: slice) -> Upstream:
        return Upstream._make(None if x is None else x[tokens] for x in self)


def statistics(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The target's logit, the entropy and the log-sum-exp of each token: (N,) each. The logits are spent."""
    normalizer = logits_NV.logsumexp(-1)
    chosen = logits_NV.gather(-1, targets_N[:, None])[:, 0]
    logits_NV -= normalizer[:, None]
    return chosen, -logits_NV.exp().mul_(logits_NV).sum(-1), normalizer


def slopes(
    logits_NV: Tensor, given: Upstream, *, temperature: float, curve: Tensor | float, dtype: torch.dtype
) -> Tensor:
    """The gradient with respect to what the projection gives, (N, V) in `dtype`. The logits are spent.

        d logprob_i / d logit_j = 1[j = target] - p_j
        d entropy / d logit_j = -p_j (log p_j + entropy)

    Each is divided by `temperature` and multiplied with `curve`, the slope of a cap.
    """
    logits_NV.sub_(given.normalizer[:, None])
    bend = None
    if given.of_entropy is not None:
        bend = logits_NV.exp().mul_(logits_NV + given.entropy[:, None])
        bend *= -given.of_entropy[:, None] / temperature * curve
    slope = logits_NV.exp_().neg_()
    slope.scatter_add_(-1, given.targets[:, None], given.own[:, None].to(slope.dtype))
    slope *= given.of_logprobs[:, None] / temperature * curve
    if bend is not None:
        slope += bend
    return slope.to(dtype)


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
