"""Log-probs of target tokens, with only a chunk of the logits in memory at a time.

A kernel in Triton computes what a chunk says of its tokens, if it runs and is right; else plain tensor
operations do (`kernels.softmax`). Token masks, as the engine sampled under them, cut logits off.

Rows of the output projection are computed in chunks. Forward keeps one number per token, the log-sum-exp, and
backward computes the logits again. If there is one chunk only, it is kept, because backward begins with it.
Memory: one chunk of logits, and the gradient of the projection in float32. If the vocabulary is divided among
ranks, ranks exchange three numbers per token, and no logits.

Shape suffixes: N = tokens, H = hidden size, V = vocabulary, or this rank's block of it, R = ranks, K =
allowed tokens of all tokens of a row.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from millrace.devices.gpu import has_own_memory, on
from millrace.devices.matmul import add_matmul, matmul, matmul_wide, wide_factor
from millrace.devices.operators import agrees
from millrace.trainer.kernels.row_threads import turns_of
from millrace.trainer.kernels.softmax import Upstream, slopes, statistics
from millrace.trainer.recorded import TokenMasks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


Tensor = torch.Tensor

CHUNK_LOGITS, GPU_CHUNK_LOGITS = 1 << 23, 1 << 27  # logits computed at once: 32 and 512 MiB in float32
TURN = threading.Lock()  # rows that are computed at the same time have one row's memory here


def token_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    temperature: float,
    softcap: float | None = None,
    group: ProcessGroup | None = None,
    token_masks: DeviceTokenMasks | None = None,
    rounded_VH: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of `targets_N` under softmax(logits / temperature), and that softmax's entropy. With
    `token_masks` the softmax is over a token's allowed tokens, which include its target.

        logits = z | softcap * tanh(z / softcap),   z = hidden weight^T

    Shapes:
        hidden_NH, weight_VH  any float type; factors are rounded to the type of `hidden_NH`, logits are not
        targets_N             (N,) token ids
        returns               (N,) log-probs, (N,) entropies; float32, in nats. Only a gradient of entropies
                              costs more
        rounded_VH            the numbers of `weight_VH` in the type of `hidden_NH`, if somebody has them
        With `group`, V is this rank's block of the vocabulary, and targets are counted from its first token.
    """
    with TURN:
        return _TokenLogprobs.apply(
            hidden_NH, weight_VH, targets_N, temperature, softcap, group, token_masks, rounded_VH
        )


def _scaled_logits(
    hidden: torch.Tensor, weight: torch.Tensor, temperature: float, softcap: float | None
) -> torch.Tensor:
    logits = matmul_wide(hidden, weight.T)
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _wide_factor(weight: torch.Tensor, rounded: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if rounded is None:
        return wide_factor(weight, dtype)
    return rounded if has_own_memory(weight.device) else weight


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _local_targets(targets: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets as rows of `weight`, and a mask of the targets that this rank has."""
    last = weight.shape[0] - 1
    return targets.clamp(0, last), (targets >= 0) & (targets <= last)


def _of_all(
    chosen: torch.Tensor, entropy: torch.Tensor, normalizer: torch.Tensor, group: ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The target's logit, the entropy and the normalizer of the whole vocabulary, from those of each rank's
    block. `chosen` is 0 if the target is not in the block."""
    from torch import distributed

    of_rank = torch.stack([chosen, entropy, normalizer])
    of_ranks = [torch.empty_like(of_rank) for _ in range(group.size())]
    distributed.all_gather(of_ranks, of_rank, group=group)
    chosen_RN, entropy_RN, normalizer_RN = torch.stack(of_ranks, dim=1)
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
        rounded: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        factor = _wide_factor(weight, rounded, hidden.dtype)
        rows = max(
            1, (GPU_CHUNK_LOGITS if has_own_memory(weight.device) else CHUNK_LOGITS) // weight.shape[0]
        )
        local, is_local = _local_targets(targets, weight)
        softmax = softmax_on(weight.device, _wide(hidden), softcap)
        results = []
        for index, (chunk, chunk_targets) in enumerate(
            zip(hidden.split(rows), local.split(rows), strict=True)
        ):
            logits = _scaled_logits(chunk, factor, temperature, softcap)
            if token_masks is not None:
                token_masks.cut(logits, index * rows)
            results.append(softmax.statistics(logits, chunk_targets))
        chosen, entropy, normalizer = (torch.cat(chunks) for chunks in zip(*results, strict=True))
        if group is not None:
            chosen, entropy, normalizer = _of_all(chosen * is_local, entropy, normalizer, group)
        alone = len(results) == 1 and group is None and softcap is None and softmax is GENERAL
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy)
        ctx.logits = logits if alone else None
        ctx.temperature, ctx.softcap, ctx.rows, ctx.token_masks = temperature, softcap, rows, token_masks
        ctx.rounded, ctx.parameter = rounded, weight
        ctx.set_materialize_grads(False)
        return chosen - normalizer, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, normalizer, entropy = ctx.saved_tensors
        kept, ctx.logits = ctx.logits, None
        if kept is not None:  # `statistics` has subtracted the normalizer
            normalizer = torch.zeros_like(normalizer)
        of_logprobs = torch.zeros_like(normalizer) if grads[0] is None else grads[0]
        grad_hidden = torch.empty_like(hidden)
        frozen = not ctx.needs_input_grad[1]
        upstream = Upstream(*_local_targets(targets, weight), normalizer, entropy, of_logprobs, grads[1])
        softmax = softmax_on(weight.device, _wide(hidden), ctx.softcap)
        turns = None if frozen else turns_of(ctx.parameter)
        on_gpu = has_own_memory(weight.device)
        total = ctx.parameter.grad if on_gpu and ctx.rounded is not None and not frozen else None
        shape = (0,) if frozen or turns is not None else weight.shape
        own = torch.zeros(shape, dtype=_wide(weight), device=weight.device) if total is None else total
        with nullcontext(own) if turns is None else turns.sum_of(ctx.parameter) as grad_weight, TURN:
            factor = weight.to(hidden.dtype) if ctx.rounded is None else ctx.rounded
            wide = factor if ctx.rounded is None else weight
            if kept is None:
                wide = _wide_factor(wide, ctx.rounded, hidden.dtype)
            of_slopes = factor.dtype if on_gpu else _wide(factor)  # a CPU sums in its factors' type
            for start in range(0, hidden.shape[0], ctx.rows):
                chunk = slice(start, start + ctx.rows)
                logits = kept
                if logits is None:
                    logits = _scaled_logits(hidden[chunk], wide, ctx.temperature, ctx.softcap)
                curve = 1.0
                if ctx.softcap is not None:  # d softcap tanh(z / softcap) / d z = 1 - tanh^2(z / softcap)
                    curve = 1 - (logits * (ctx.temperature / ctx.softcap)).square_()
                if ctx.token_masks is not None and kept is None:  # what is not allowed has no slope
                    ctx.token_masks.cut(logits, start)
                scale = {"temperature": ctx.temperature, "curve": curve}
                slope = softmax.slopes(logits, upstream.of(chunk), **scale, dtype=of_slopes)
                grad_hidden[chunk] = matmul(slope.to(factor.dtype), factor)
                if not frozen:
                    add_matmul(grad_weight, slope.T, hidden[chunk].to(of_slopes))
        added = frozen or turns is not None or total is not None
        of_weight = None if added else grad_weight.to(weight.dtype)
        return grad_hidden, of_weight, None, None, None, None, None, None


# ---------------------------------------------------------------- token masks


CUT = -1e30
"""The logit of a token that could not be sampled. Finite: a rank may hold no allowed token."""


@dataclass(frozen=True, slots=True)
class DeviceTokenMasks:
    """`rows_K` and `tokens_K`: the logits that stay. The entries of token n start at `begins[n]`."""

    begins: list[int]
    rows_K: torch.Tensor
    tokens_K: torch.Tensor
    cut_N: torch.Tensor

    def cut(self, logits: torch.Tensor, start: int) -> None:
        """Mask the logits of tokens [start, start + len(logits)), in place, where they are not allowed."""
        entries = slice(self.begins[start], self.begins[start + len(logits)])
        outside = self.cut_N[start : start + len(logits), None].repeat(1, logits.shape[1])
        outside[self.rows_K[entries] - start, self.tokens_K[entries]] = False
        logits.masked_fill_(outside, CUT)


def masks_on(device: torch.device, masks: TokenMasks, first: int, vocabulary: int) -> DeviceTokenMasks:
    """The masks on a device that holds `vocabulary` tokens from `first` on."""
    tokens = masks.tokens_K - first
    inside = (tokens >= 0) & (tokens < vocabulary)
    rows = np.repeat(np.arange(len(masks.counts_N)), masks.counts_N)[inside]
    begins = np.searchsorted(rows, np.arange(len(masks.counts_N) + 1))
    return DeviceTokenMasks(
        begins.tolist(),
        on(device, rows),
        on(device, tokens[inside].astype(np.int64)),
        on(device, masks.counts_N > 0),
    )


# ---------------------------------------------------------------- a kernel in Triton, or the general way


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
    fuses = agrees("log-probs are computed", lambda: disagreement(_kernels(), device), TOLERANCE)
    return _kernels() if fuses else None


def _kernels() -> Softmax:
    from millrace.trainer.kernels import trainer_tiles

    return Softmax(trainer_tiles.statistics, trainer_tiles.slopes)


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
