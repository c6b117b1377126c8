"""The trainer's kernels in Triton: `softmax`, and `fused_attention.repeat_sums`.

`softmax` is one pass over the logits forward, and one backward. A program reads a row of logits tile by tile,
and keeps three numbers: the largest logit m so far, sum e^(x - m) and sum e^(x - m) (x - m). A larger m
rescales the other two, as in arXiv:1805.02867.

Shape suffixes: N = tokens, V = vocabulary, or this rank's part of it; T = tokens, K = gathered rows, C =
columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from millrace.trainer.kernels.softmax import Upstream

Tensor = torch.Tensor
TILE = 4096
COLUMNS = 512
LOWEST = tl.constexpr(-3.0e38)  # no logit is lower, and a product with 0 is 0


@triton.jit
def _statistics(  # type: ignore[no-untyped-def]
    logits, targets, chosen, entropy, normalizer, vocabulary, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    highest = tl.full((), LOWEST, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    for start in range(0, vocabulary, TILE):
        columns = start + tl.arange(0, TILE)
        inside = columns < vocabulary
        x = tl.load(logits + columns, mask=inside, other=LOWEST)
        top = tl.maximum(highest, tl.max(x, axis=0))
        shrink = tl.exp(highest - top)
        weighted = shrink * (weighted + total * (highest - top))
        total = total * shrink
        e = tl.where(inside, tl.exp(x - top), 0.0)
        total += tl.sum(e, axis=0)
        weighted += tl.sum(tl.where(inside, e * (x - top), 0.0), axis=0)
        highest = top
    spread = tl.log(total)
    tl.store(normalizer + row, highest + spread)
    tl.store(entropy + row, spread - weighted / total)
    tl.store(chosen + row, tl.load(logits + tl.load(targets + row)))


@triton.jit
def _slopes(  # type: ignore[no-untyped-def]
    logits,
    slope,
    targets,
    own,
    normalizer,
    entropy,
    of_logprobs,
    of_entropy,
    temperature,
    vocabulary,
    BENDS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < vocabulary
    logprob = tl.load(logits + row * vocabulary + columns, mask=inside, other=LOWEST) - tl.load(
        normalizer + row
    )
    p = tl.exp(logprob)
    one = tl.where(columns == tl.load(targets + row), tl.load(own + row), 0.0)
    found = (one - p) * (tl.load(of_logprobs + row) / temperature)
    if BENDS:
        found -= p * (logprob + tl.load(entropy + row)) * (tl.load(of_entropy + row) / temperature)
    tl.store(slope + row * vocabulary + columns, found.to(slope.dtype.element_ty), mask=inside)


def statistics(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `softmax.statistics`; the logits stay."""
    rows, vocabulary = logits_NV.shape
    assert logits_NV.is_contiguous() and targets_N.is_contiguous(), logits_NV.stride()
    chosen, entropy, normalizer = logits_NV.new_empty((3, rows))
    _launch(_statistics, (rows,), logits_NV, targets_N, chosen, entropy, normalizer, vocabulary)
    return chosen, entropy, normalizer


def slopes(
    logits_NV: Tensor, given: Upstream, *, temperature: float, curve: float, dtype: torch.dtype
) -> Tensor:
    """As `softmax.slopes`, without a cap; the logits stay."""
    rows, vocabulary = logits_NV.shape
    assert curve == 1.0 and logits_NV.is_contiguous(), (curve, logits_NV.stride())
    slope = torch.empty_like(logits_NV, dtype=dtype)
    bends = given.of_entropy is not None
    of_entropy = given.of_entropy if given.of_entropy is not None else given.of_logprobs
    columns = (given.targets, given.own.to(logits_NV.dtype), given.normalizer, given.entropy)
    numbers = (x.contiguous() for x in (*columns, given.of_logprobs, of_entropy))
    grid = (rows, triton.cdiv(vocabulary, TILE))
    _launch(_slopes, grid, logits_NV, slope, *numbers, temperature, vocabulary, bends)
    return slope


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any) -> None:
    if grid[0]:
        kernel[grid](*arguments, TILE)


# ---------------------------------------------------------------- sums of repeated rows


@triton.jit
def _sums(rows, order, begins, sums, num_columns, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < num_columns
    total = tl.zeros((TILE,), tl.float32)
    for place in range(tl.load(begins + token), tl.load(begins + token + 1)):
        row = tl.load(order + place).to(tl.int64)
        total += tl.load(rows + row * num_columns + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + token * num_columns + columns, total.to(sums.dtype.element_ty), mask=inside)


def repeat_sums(rows_KC: Tensor, order_K: Tensor, begins_T: Tensor) -> Tensor:
    """As `fused_attention.repeat_sums`. torch's gradient of a gather would sort the indices in each layer."""
    rows_KC, tokens, num_columns = rows_KC.contiguous(), len(begins_T) - 1, rows_KC.shape[1]
    sums_TC = rows_KC.new_empty((tokens, num_columns))
    grid = (tokens, triton.cdiv(num_columns, COLUMNS))
    _sums[grid](rows_KC, order_K, begins_T, sums_TC, num_columns, COLUMNS)
    return sums_TC
