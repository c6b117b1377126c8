"""What a block of logits says of chosen tokens, and the gradient with respect to these logits.

This is the general way, of plain tensor operations. `trainer_tiles` computes the same in one pass.

Shape suffixes: N = tokens, V = vocabulary, or this rank's part of it.
"""

from __future__ import annotations

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
