"""Sampling on a GPU: all but the edits is one kernel, which does not sort. Its tokens are those of the CPU.

Shape suffixes: N rows, V vocabulary, S settings, R rows with a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from millrace.core.types import Sampling
from millrace.devices.operators import OPERATORS, agrees, define

Tensor = torch.Tensor

UNLIMITED = 1 << 31
"""The top-k of a row without one: more than any vocabulary has."""

TOLERANCE = 1e-4  # of log-probs, which are float32 sums over a vocabulary in another order


@cache
def has_kernel(device: torch.device, sampler: Callable[..., Any]) -> bool:
    """Whether one kernel samples there: on a GPU where Triton runs, if it agrees with `sampler` on a CPU."""
    return device.type == "cuda" and agrees(
        "tokens are drawn", lambda: disagreement(device, sampler), TOLERANCE
    )


def disagreement(device: torch.device, sampler: Callable[..., Any]) -> float:
    """The largest distance of log-probs from those of the CPU. Infinite if a token or a mask differs."""
    generator = torch.Generator().manual_seed(0)
    cuts = [{}, {"top_k": 20}, {"top_p": 0.9}, {"top_k": 9, "top_p": 0.5}, {"min_p": 0.1}]
    samplings = [Sampling(max_tokens=1, temperature=0.7, **each) for each in cuts]  # type: ignore[arg-type]
    samplings.append(Sampling(max_tokens=1, temperature=0.0))
    logits_NV = 3 * torch.randn((len(samplings), 5_000), generator=generator)
    uniforms_N = torch.rand(len(samplings), generator=generator, dtype=torch.float64)
    expected = sampler(samplings, torch.device("cpu"))(logits_NV, uniforms_N)
    masked = [i for i, sampling in enumerate(samplings) if sampling.cuts]
    numbers = (x.to(device) for x in (logits_NV, uniforms_N, settings_of(samplings, masked)))
    tokens_N, logprobs_N, allowed_RV = (x.cpu() for x in OPERATORS.drawn(*numbers, len(masked)))
    assert expected.allowed_RV is not None
    same = torch.equal(tokens_N, expected.tokens) and torch.equal(allowed_RV, expected.allowed_RV)
    return float((logprobs_N - expected.logprobs).abs().max()) if same else float("inf")


def settings_of(samplings: Sequence[Sampling], masked: Sequence[int]) -> Tensor:
    """(N, S) float64: temperature, log of min-p in float32, top-k, top-p, whether it is greedy, and the row's
    place among those with a mask, or -1. A greedy row has no cuts."""
    uncut = Sampling(max_tokens=1)
    cuts = [s if s.cuts else uncut for s in samplings]
    places = {row: place for place, row in enumerate(masked)}
    columns = (
        [s.temperature or 1.0 for s in samplings],
        torch.tensor([s.min_p for s in cuts]).log().tolist(),
        [s.top_k or UNLIMITED for s in cuts],
        [s.top_p for s in cuts],
        [s.temperature == 0 for s in samplings],
        [places.get(row, -1) for row in range(len(samplings))],
    )
    return torch.tensor(columns, dtype=torch.float64).T.contiguous()


def _drawn_shape(
    logits_NV: Tensor, uniforms_N: Tensor, settings_NS: Tensor, num_masks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, log-probs, and what each row with a mask could sample."""
    rows, vocab = logits_NV.shape
    allowed_RV = logits_NV.new_empty((num_masks, vocab), dtype=torch.bool)
    return logits_NV.new_empty(rows, dtype=torch.int64), logits_NV.new_empty(rows), allowed_RV


define(
    "drawn(Tensor logits, Tensor uniforms, Tensor settings, int num_masks) -> (Tensor, Tensor, Tensor)",
    "millrace.engines.own.accelerated.draw_tiles",
    shape=_drawn_shape,
)
