"""The distance of a batch's tokens from the policy that is trained, by their age. Pure.

Shape suffix: N = trained tokens of a batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

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
