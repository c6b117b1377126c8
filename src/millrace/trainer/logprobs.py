"""Log-probs of chosen tokens without ever holding all logits.

Rows of the output projection are computed in chunks; forward keeps one number per token (the
log-sum-exp), backward computes the logits again. Memory: one chunk of logits, plus the gradient of the
projection in float32. Where ranks hold a part of the vocabulary each, none holds logits of the others: they
exchange three numbers per token.

Shape suffixes: N = tokens, H = hidden size, V = vocabulary, or this rank's part of it, R = ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from millrace.devices.matmul import by_onednn, matmul

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from millrace.trainer.batch.token_masks import DeviceTokenMasks

CHUNK_LOGITS, GPU_CHUNK_LOGITS = 1 << 24, 1 << 27  # logits computed at once: 64 and 512 MiB in float32


def token_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    temperature: float,
    softcap: float | None = None,
    group: ProcessGroup | None = None,
    token_masks: DeviceTokenMasks | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of `targets_N` under softmax(logits / temperature), and that softmax's entropy. With
    `token_masks`, the softmax of these alone; each target is among its own.

        logits = z | softcap * tanh(z / softcap),   z = hidden weight^T

    Shapes:
        hidden_NH, weight_VH  any float type; the matmul is computed in the type of `hidden_NH`
        targets_N             (N,) token ids
        returns               (N,) log-probs, (N,) entropies; float32, in nats. A gradient of entropies costs
                              something only where there is one
        With `group`, V is this rank's part of the vocabulary, and targets are counted from its first token.
    """
    return _TokenLogprobs.apply(hidden_NH, weight_VH, targets_N, temperature, softcap, group, token_masks)


def _scaled_logits(
    hidden: torch.Tensor, weight: torch.Tensor, temperature: float, softcap: float | None
) -> torch.Tensor:
    logits = matmul(hidden, weight.T)
    logits = logits.to(_wide(logits))
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _held(targets: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets as rows of `weight`, and which of them are: the others lie with other ranks."""
    last = weight.shape[0] - 1
    return targets.clamp(0, last), (targets >= 0) & (targets <= last)


def _of_all(
    chosen: torch.Tensor, entropy: torch.Tensor, normalizer: torch.Tensor, group: ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From what each rank finds in its part: the target's logit or 0, the entropy, the normalizer."""
    from torch import distributed

    own = torch.stack([chosen, entropy, normalizer])
    parts = [torch.empty_like(own) for _ in range(group.size())]
    distributed.all_gather(parts, own, group=group)
    chosen_RN, entropy_RN, normalizer_RN = torch.stack(parts, dim=1)
    normalizer = normalizer_RN.logsumexp(0)
    share_RN = (normalizer_RN - normalizer).exp()
    entropy = (share_RN * (entropy_RN + normalizer - normalizer_RN)).sum(0)
    return chosen_RN.sum(0), entropy, normalizer


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        softcap: float | None,
        group: ProcessGroup | None,
        token_masks: DeviceTokenMasks | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cast = weight.to(hidden.dtype)
        rows = max(1, (GPU_CHUNK_LOGITS if weight.is_cuda else CHUNK_LOGITS) // weight.shape[0])
        held, own = _held(targets, weight)
        found = []
        for index, (part, wanted) in enumerate(zip(hidden.split(rows), held.split(rows), strict=True)):
            logits = _scaled_logits(part, cast, temperature, softcap)
            if token_masks is not None:
                token_masks.cut(logits, index * rows)
            normalizer = logits.logsumexp(-1)
            chosen = logits.gather(-1, wanted[:, None])[:, 0]
            logits -= normalizer[:, None]
            found.append((chosen, -logits.exp().mul_(logits).sum(-1), normalizer))
        chosen, entropy, normalizer = (torch.cat(parts) for parts in zip(*found, strict=True))
        if group is not None:
            chosen, entropy, normalizer = _of_all(chosen * own, entropy, normalizer, group)
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy)
        ctx.temperature, ctx.softcap, ctx.rows, ctx.token_masks = temperature, softcap, rows, token_masks
        ctx.set_materialize_grads(False)
        return chosen - normalizer, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, normalizer, entropy = ctx.saved_tensors
        of_logprobs = torch.zeros_like(normalizer) if grads[0] is None else grads[0]
        of_entropy = grads[1]
        cast = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        frozen = not ctx.needs_input_grad[1]
        grad_weight = torch.zeros(0 if frozen else weight.shape, dtype=_wide(weight), device=weight.device)
        held, own = _held(targets, weight)
        for start in range(0, hidden.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            logits = _scaled_logits(hidden[part], cast, ctx.temperature, ctx.softcap)
            curve = 1.0
            if ctx.softcap is not None:  # d softcap tanh(z / softcap) / d z = 1 - tanh^2(z / softcap)
                curve = 1 - (logits * (ctx.temperature / ctx.softcap)).square_()
            if ctx.token_masks is not None:  # what could not come has the probability 0, and no slope
                ctx.token_masks.cut(logits, start)
            logits.sub_(normalizer[part, None])
            bend = None
            if of_entropy is not None:  # d entropy / d logit_j = -p_j (log p_j + entropy) / temperature
                bend = logits.exp().mul_(logits + entropy[part, None])
                bend *= -of_entropy[part, None] / ctx.temperature * curve
            # d logprob_i / d logit_j = (1[j = target] - p_j) / temperature
            slope = logits.exp_().neg_()
            slope.scatter_add_(-1, held[part, None], own[part, None].to(slope.dtype))
            slope *= of_logprobs[part, None] / ctx.temperature * curve
            if bend is not None:
                slope += bend
            slope = slope.to(hidden.dtype)
            grad_hidden[part] = matmul(slope, cast)
            if frozen:
                continue
            if slope.dtype == grad_weight.dtype and not by_onednn():
                grad_weight.addmm_(slope.T, hidden[part])
            else:
                grad_weight += matmul(slope.T, hidden[part])
        of_weight = None if frozen else grad_weight.to(weight.dtype)
        return grad_hidden, of_weight, None, None, None, None, None
