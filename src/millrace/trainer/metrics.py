"""The metrics of a step. Pure: numpy alone. Shape suffix: N = trained tokens of the batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.core.rounding import all_equal
from millrace.core.types import Batch


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Means over the batch's sequences, and the fraction of groups whose rewards are all equal."""
    sequences = [sequence for group in batch.groups for sequence in group.sequences]
    rewards = [[sequence.reward for sequence in group.sequences] for group in batch.groups]
    return {
        "reward": float(np.mean([s.reward for s in sequences])),
        "reward_std": float(np.mean([np.std(group) for group in rewards])),
        "groups_without_signal": float(np.mean([all_equal(group) for group in rewards])),
        "completion_tokens": float(np.mean([len(s.columns) for s in sequences])),
        "truncated": float(np.mean([s.truncated for s in sequences])),
    }


def value_metrics(values_N: NDArray[Any], returns_N: NDArray[Any]) -> dict[str, float]:
    """Metrics before the first step of a batch: `value_mean`, and `value_explained`, the share of the
    returns' variance that the values explain (1: all of it, 0: as much as a constant, below 0: less)."""
    if not values_N.size:
        return {}
    spread = float(np.var(returns_N))
    explained = 0.0 if all_equal(returns_N.tolist()) else 1.0 - float(np.var(returns_N - values_N)) / spread
    return {"value_mean": float(values_N.mean()), "value_explained": explained}


def _nothing() -> NDArray[Any]:
    return np.empty(0, np.bool_)


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """The trained tokens of a batch: (N,) each, in nats.

    log_ratio_N    current - behavior, at the beginning of the batch
    log_weight_N   the log of the weights that `cap` truncates; None: nothing truncates
    reference_N    current - reference; None: there is no reference
    judged         tokens with an advantage of each row and optimizer step; empty: no row had a gradient
    silenced       those of them that a clip or a mask left without a gradient, penalties apart
    """

    log_ratio_N: NDArray[Any] = field(default_factory=_nothing)
    entropy_N: NDArray[Any] = field(default_factory=_nothing)
    staleness_N: NDArray[np.int64] = field(default_factory=_nothing)
    after_swap_N: NDArray[np.bool_] = field(default_factory=_nothing)
    log_weight_N: NDArray[Any] | None = None
    reference_N: NDArray[Any] | None = None
    cap: float | None = None
    judged: NDArray[np.int64] = field(default_factory=_nothing)
    silenced: NDArray[np.int64] = field(default_factory=_nothing)

    def metrics(self) -> dict[str, float]:
        """The metrics of `importance_metrics`, and

        entropy            in nats
        importance_mean, importance_max    of current / behavior
        importance_capped  fraction of tokens whose weight is above the cap
        kl_reference       mean log-ratio, with a reference
        silenced           silenced / judged, of sums
        """
        if not self.log_ratio_N.size:
            return {}
        ratio_N = np.exp(self.log_ratio_N)
        out = {
            "entropy": float(self.entropy_N.mean()),
            "importance_mean": float(ratio_N.mean()),
            "importance_max": float(ratio_N.max()),
        }
        if self.cap is not None and self.log_weight_N is not None:
            out["importance_capped"] = float((np.exp(self.log_weight_N) > self.cap).mean())
        if self.reference_N is not None:
            out["kl_reference"] = float(self.reference_N.mean())
        if self.judged.size:
            out["silenced"] = int(self.silenced.sum()) / max(int(self.judged.sum()), 1)
        return out | importance_metrics(self.log_ratio_N, self.staleness_N)

    def logprob_gap(self) -> dict[int, tuple[float, float, int]]:
        """|current - behavior| in nats by staleness: (mean, max, tokens)."""
        gap = self._gap()
        gaps = {int(behind): gap[self.staleness_N == behind] for behind in np.unique(self.staleness_N)}
        return {behind: (float(gap.mean()), float(gap.max()), len(gap)) for behind, gap in gaps.items()}

    def swap_gap(self) -> dict[str, float]:
        """The gap at staleness 0 of tokens sampled before any swap of weights in their trajectory
        (gap_one_version), and of tokens after a swap (gap_after_swap). Only tokens after a swap read
        recomputed keys and values. A metric without tokens is left out."""
        gap, current, after = self._gap(), self.staleness_N == 0, self.after_swap_N
        gaps = {"gap_one_version": gap[current & ~after], "gap_after_swap": gap[current & after]}
        return {name: float(gap.mean()) for name, gap in gaps.items() if len(gap)}

    def _gap(self) -> NDArray[np.float64]:
        return np.abs(self.log_ratio_N).astype(np.float64)


AGES = (0, 1, 2, 4, 8)  # the least staleness of each class: 0, 1, 2 to 3, 4 to 7, 8 and more
LOG_MAX = 20.0


def importance_metrics(log_ratio_N: NDArray[Any], staleness_N: NDArray[np.int64]) -> dict[str, float]:
    """Metrics of w = pi / mu at the batch's beginning, over all tokens and for each class of age with tokens:

        ess          (sum w)^2 / (n sum w^2): the effective share of the tokens; 1 on-policy
        kl_behavior  mean of w - 1 - log w: an estimate of KL(mu || pi) in nats, never negative

    and over all tokens the first and the last percentile of w. Log-ratios are clipped to LOG_MAX.
    """
    log_N = np.clip(log_ratio_N.astype(np.float64), -LOG_MAX, LOG_MAX)
    w_N = np.exp(log_N)
    low, high = np.quantile(w_N, (0.01, 0.99))
    metrics = {"importance_p01": float(low), "importance_p99": float(high)} | _of(w_N, log_N, "")
    class_N = np.searchsorted(AGES, staleness_N, side="right") - 1
    for index, age in enumerate(AGES):
        if (class_mask_N := class_N == index).any():
            metrics |= _of(w_N[class_mask_N], log_N[class_mask_N], f"_age_{age}")
    return metrics


def _of(w_N: NDArray[np.float64], log_N: NDArray[np.float64], suffix: str) -> dict[str, float]:
    return {
        f"ess{suffix}": float(w_N.sum() ** 2 / (w_N.size * np.square(w_N).sum())),
        f"kl_behavior{suffix}": float((w_N - 1.0 - log_N).mean()),
    }
