"""Log-probs of chosen tokens without ever holding all logits.

Rows of the output projection are computed in chunks; forward keeps one number per token (the
log-sum-exp), backward computes the logits again. Memory: one chunk of logits, plus the gradient of the
projection in float32.

Shape suffixes: N = tokens, H = hidden size, V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

CHUNK_LOGITS = 1 << 24  # logits computed at once: 64 MiB in float32


def token_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    temperature: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of `targets_N` under softmax(logits / temperature), and that softmax's entropy.

        logits = z | softcap * tanh(z / softcap),   z = hidden weight^T

    Shapes:
        hidden_NH, weight_VH  any float type; the product is taken in the type of `hidden_NH`
        targets_N             (N,) token ids
        returns               (N,) log-probs, (N,) entropies without gradient; float32, in nats
    """
    return _TokenLogprobs.apply(hidden_NH, weight_VH, targets_N, temperature, softcap)


def _scaled_logits(
    hidden: torch.Tensor, weight: torch.Tensor, temperature: float, softcap: float | None
) -> torch.Tensor:
    logits = (hidden @ weight.T).float()
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    return logits if temperature == 1.0 else logits.div_(temperature)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cast = weight.to(hidden.dtype)
        rows = max(1, CHUNK_LOGITS // weight.shape[0])
        logprobs, entropies, normalizers = [], [], []
        for part, wanted in zip(hidden.split(rows), targets.split(rows), strict=True):
            logits = _scaled_logits(part, cast, temperature, softcap)
            normalizer = logits.logsumexp(-1)
            logprobs.append(logits.gather(-1, wanted[:, None])[:, 0] - normalizer)
            logits -= normalizer[:, None]
            entropies.append(-logits.exp().mul_(logits).sum(-1))
            normalizers.append(normalizer)
        ctx.save_for_backward(hidden, weight, targets, torch.cat(normalizers))
        ctx.temperature, ctx.softcap, ctx.rows = temperature, softcap, rows
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, normalizer = ctx.saved_tensors
        cast = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for start in range(0, hidden.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            logits = _scaled_logits(hidden[part], cast, ctx.temperature, ctx.softcap)
            scale = grads[0][part, None] / ctx.temperature
            if ctx.softcap is not None:  # d softcap tanh(z / softcap) / d z = 1 - tanh^2(z / softcap)
                scale = scale * (1 - (logits * (ctx.temperature / ctx.softcap)).square_())
            # d logprob_i / d logit_j = (1[j = target] - p_j) / temperature
            slope = logits.sub_(normalizer[part, None]).exp_().neg_()
            slope[torch.arange(slope.shape[0], device=slope.device), targets[part]] += 1.0
            slope *= scale
            slope = slope.to(hidden.dtype)
            torch.mm(slope, cast, out=grad_hidden[part])
            if slope.dtype == torch.float32:
                grad_weight.addmm_(slope.T, hidden[part])
            else:
                grad_weight += slope.T @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None
