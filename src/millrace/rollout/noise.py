"""Uniform noise as a pure function of (run seed, trajectory id, position).

The generator counts and has no state. So a token's noise does not depend on the place, the time or the
neighbours of its sampling. Each of the three numbers passes through the SplitMix64 finalizer (Steele et al.,
2014, "Fast splittable pseudorandom number generators"), a bijection of 64-bit words.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_MASK = (1 << 64) - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Noise:
    """The noise of N trajectories, at any of their positions."""

    def __init__(self, seeds: Sequence[int], trajectory_ids: Sequence[int]) -> None:
        self._state_N = _absorb(np.zeros(len(seeds), dtype=np.uint64), _words(seeds))
        self._state_N = _absorb(self._state_N, _words(trajectory_ids))

    def uniforms(self, positions: Sequence[int], count: int) -> np.ndarray:
        """(N, count) float64 in [0, 1) with 52 random bits: of positions[i], positions[i] + 1, ...

        52 and not 53: then `u * total` is below `total` after rounding, too.
        """
        words = _words(positions)[:, None] + np.arange(count, dtype=np.uint64)
        state = _absorb(self._state_N[:, None], words)
        return (state >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _words(numbers: Sequence[int]) -> np.ndarray:
    return np.array([number & _MASK for number in numbers], dtype=np.uint64)


def _absorb(state: np.ndarray, words: np.ndarray) -> np.ndarray:
    words = (state ^ words) + _GAMMA
    words = (words ^ (words >> np.uint64(30))) * _MULTIPLIERS[0]
    words = (words ^ (words >> np.uint64(27))) * _MULTIPLIERS[1]
    return words ^ (words >> np.uint64(31))
