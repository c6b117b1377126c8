"""Rotary frequencies, by the formulas of their papers. No code here depends on the length of a sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.core.errors import DataError


@dataclass(frozen=True, eq=False)
class Frequencies:
    """`inverse`: radians a position, (head_dim / 2,) float32. `factor`: of cosines and sines."""

    inverse: NDArray[np.float32]
    factor: float = 1.0


def frequencies(parameters: Mapping[str, Any], head_dim: int) -> Frequencies:
    """The frequencies that `rope_parameters` of a configuration describe.

        default  theta^(-2 i / head_dim), i = 0 .. head_dim / 2 - 1      (arXiv:2104.09864)
        linear   the default / factor
        llama3   long waves / factor, short waves as they are, between them a blend (arXiv:2407.21783)
        yarn     the same blend over the index i, and a factor of the tables (arXiv:2309.00071)

    Raises: DataError: another type.
    """
    kind, theta = parameters["rope_type"], parameters["rope_theta"]
    dims = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    exponents = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    inverse = (1.0 / np.float32(theta) ** exponents).astype(np.float32)
    if kind == "default":
        return Frequencies(inverse)
    if kind == "linear":
        return Frequencies(inverse / np.float32(parameters["factor"]))
    if kind == "llama3":
        return Frequencies(_llama3(inverse, parameters))
    if kind == "yarn":
        return _yarn(inverse, parameters)
    raise DataError(f"`rope_type` {kind!r} has no formula in this trainer")


def _llama3(inverse: NDArray[np.float32], parameters: Mapping[str, Any]) -> NDArray[np.float32]:
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * inverse / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0, 1)  # of the frequency as it is
    return ((1 - share) * inverse / parameters["factor"] + share * inverse).astype(np.float32)


def _yarn(inverse: NDArray[np.float32], parameters: Mapping[str, Any]) -> Frequencies:
    factor, theta = parameters["factor"], parameters["rope_theta"]
    original = parameters["original_max_position_embeddings"]
    dims = 2 * len(inverse)

    def index(turns: float) -> float:
        """Of the frequency that makes so many turns over the original length."""
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index(parameters.get("beta_fast") or 32), index(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = np.clip((np.arange(dims // 2) - low) / max(high - low, 0.001), 0, 1)
    blended = inverse / factor * ramp + inverse * (1 - ramp)
    scale = parameters.get("attention_factor")
    if scale is None:
        scale = _yarn_scale(parameters)
    return Frequencies(blended.astype(np.float32), float(scale))


def _yarn_scale(parameters: Mapping[str, Any]) -> float:
    factor = parameters["factor"]

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    over, under = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scale(over) / scale(under) if over and under else scale(1.0)
