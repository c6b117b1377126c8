"""MinHash with banded hashing: finds similar sets among very many without comparing all pairs.

    P(one value of the signatures is equal) = J(A, B) = |A and B| / |A or B|
    P(a pair with similarity s shares a band) = 1 - (1 - s^rows)^bands

Source:
    Broder, On the resemblance and containment of documents, 1997; Leskovec, Rajaraman and Ullman, Mining of
    Massive Datasets, section 3.4. Unlike there, a pair that shares a band is compared exactly.

The package `datasketch` (2.0) could make signatures and buckets. With the bands of `rows_per_band` it finds
the same rows: 20,000 made-up texts, six thresholds. With bands of its own it misses 135 of 688 rows at 0.8.
So that rule and the comparison would stay, and 30 lines of code would take the place of 43. It needs scipy,
of 140 MB, and a plain install could not curate. So this stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from millrace_curation.words import Hashes

PERMUTATIONS = 128
MISSED_MAX = 1e-3
"""The most pairs at the threshold that share no band."""


def signatures(sets: Sequence[Hashes], *, seed: int = 0) -> npt.NDArray[np.uint32]:
    """The signature of each set of hashes: (sets, PERMUTATIONS). No set may be empty."""
    random = np.random.default_rng(seed)
    factors, shifts = random.integers(0, 2**63, (2, PERMUTATIONS, 1), dtype=np.uint64)
    factors = factors * np.uint64(2) + np.uint64(1)
    result = np.empty((len(sets), PERMUTATIONS), np.uint32)
    for row, hashes in enumerate(sets):
        result[row] = ((factors * hashes + shifts) >> np.uint64(32)).min(axis=1)
    return result


def rows_per_band(threshold: float) -> int:
    """The most values in a band with which at most `MISSED_MAX` of the pairs at the threshold are missed."""
    fitting = [r for r in range(1, 17) if (1 - threshold**r) ** (PERMUTATIONS // r) <= MISSED_MAX]
    return max(fitting, default=1)


def similarity(a: Hashes, b: Hashes) -> float:
    """Jaccard's similarity of two sets, each sorted and not empty."""
    both = len(np.intersect1d(a, b, assume_unique=True))
    return both / (len(a) + len(b) - both)


def near_earlier(
    sets: Sequence[Hashes], kinds: Sequence[Hashable], threshold: float
) -> dict[int, tuple[int, float]]:
    """Each set that is similar to an earlier one: the index of the most similar, and the similarity.

    A set that is here is no longer compared with: what is left has no two similar sets. Sets of different
    `kinds` are never similar.
    """
    rows = rows_per_band(threshold)
    marks = signatures(sets)
    buckets: dict[Hashable, list[int]] = defaultdict(list)
    near: dict[int, tuple[int, float]] = {}
    for index, (one, kind) in enumerate(zip(sets, kinds, strict=True)):
        keys = [
            (kind, start, marks[index, start : start + rows].tobytes())
            for start in range(0, PERMUTATIONS - rows + 1, rows)
        ]
        earlier = sorted({other for key in keys for other in buckets.get(key, ())})
        best = max(((similarity(one, sets[other]), -other) for other in earlier), default=(0.0, 0))
        if best[0] >= threshold:
            near[index] = -best[1], best[0]
            continue
        for key in keys:
            buckets[key].append(index)
    return near
