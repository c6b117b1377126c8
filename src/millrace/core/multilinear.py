"""A digest that a GPU computes where the bytes are: sums of integer products, alike in numpy, torch and JAX.

The bytes are taken as little-endian words of 8 bytes, in blocks of `WORDS`; the last block is filled up with
zeros. Of each block there are two sums modulo 2^64. With the odd keys k and k' of a word's place:

    low = sum k w        high = sum k' floor(w / 2^32)

The digest is XXH3-128 of all sums in order and of the number of bytes. The sums are a 512th of the bytes:
only they leave the device.

**Bound.** Let another content of a block differ by d in its words, and t be the zeros at the end of all
these d. If a low half differs, t is below 32. For a place where d ends in t zeros, k d must then be one
number, whatever the other keys are. That settles all but t of the 63 free bits of k: `low` is the same with
probability 2^(t-63), at most 2^-32. If only high halves differ, the same holds for `high`. Changes to the
last bits of both halves are missed with probability 2^-126. Such is the chance over the keys, for a change
that was chosen without a look at them. For the order of blocks XXH3 answers, with 2^-128.

**Certain.** Every flip of one bit changes a sum, because the keys are odd. So does every exchange of two
elements of 1, 2, 4 or 8 bytes within a block: the difference of two keys ends in less than 33 zeros.

Source: multilinear hashing of Carter and Wegman (1979) as in Lemire and Kaser, "Strongly universal string
hashing is fast" (arXiv:1202.4961), which keeps the upper bits of one sum of half words. Keys: SplitMix64
(Steele, Lea, Flood 2014).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

WORDS = 1024
BLOCK_BYTES = 8 * WORDS
BAND = 64  # blocks at a time: they stay in the cache
HALF = np.uint64(32)

Words = NDArray[np.uint64]


def _keys() -> Words:
    """(2, WORDS): those of `low`, those of `high`."""
    z = np.arange(1, 2 * WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ z >> np.uint64(shift)) * np.uint64(factor)
    return ((z ^ z >> np.uint64(31)) | np.uint64(1)).reshape(2, WORDS)


KEYS = _keys()


def block_sums(words: Any, keys: Any) -> tuple[Any, Any]:
    """(low, high), each (blocks,), of `words` (blocks, WORDS) and `keys` (2, WORDS): int64 arrays of one
    library, in which they wrap. In JAX with `enable_x64`."""
    low = (words * keys[0]).sum(-1)
    high = (((words >> 32) & 0xFFFFFFFF) * keys[1]).sum(-1)
    return low, high


def finished(sums: Any, num_bytes: int) -> str:
    """The digest of so many bytes. `sums`: a buffer of (blocks, 2) int64: low and high."""
    state = xxhash.xxh3_128(sums)
    state.update(num_bytes.to_bytes(8, "little"))
    return state.hexdigest()


class Multilinear:
    """The digest of bytes that come in parts of any size, as the states of xxhash."""

    def __init__(self) -> None:
        self._state, self._left, self._num_bytes = xxhash.xxh3_128(), b"", 0
        self._high = np.empty((BAND, WORDS), np.uint64)

    def update(self, data: Any) -> None:
        """`data`: contiguous bytes."""
        part = np.frombuffer(data, np.uint8)
        self._num_bytes += len(part)
        if self._left:
            missing = BLOCK_BYTES - len(self._left)
            self._left += part[:missing].tobytes()
            part = part[missing:]
            if len(self._left) < BLOCK_BYTES:
                return
            self._take(np.frombuffer(self._left, np.uint8))
        whole = len(part) - len(part) % BLOCK_BYTES
        self._take(part[:whole])
        self._left = part[whole:].tobytes()

    def hexdigest(self) -> str:
        state = self._state.copy()
        if self._left:
            state.update(self._sums(np.frombuffer(self._left.ljust(BLOCK_BYTES, b"\0"), np.uint8)))
        state.update(self._num_bytes.to_bytes(8, "little"))
        return state.hexdigest()

    def _take(self, blocks: NDArray[np.uint8]) -> None:
        step = BAND * BLOCK_BYTES
        for start in range(0, len(blocks), step):
            self._state.update(self._sums(blocks[start : start + step]))

    def _sums(self, blocks: NDArray[np.uint8]) -> memoryview:
        """(blocks, 2). As `block_sums`, without memory of its own."""
        words = blocks.view("<u8").reshape(-1, WORDS)
        sums, high = np.empty((len(words), 2), np.uint64), self._high[: len(words)]
        np.einsum("bw,w->b", words, KEYS[0], out=sums[:, 0])
        np.right_shift(words, HALF, out=high)
        np.einsum("bw,w->b", high, KEYS[1], out=sums[:, 1])
        return sums.data
