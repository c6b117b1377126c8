"""A digest that a GPU computes where the bytes are: sums of integer products, equal in numpy, torch and JAX.

The bytes are taken as little-endian words of 8 bytes, in blocks of `WORDS`. The last block is filled up with
zeros. Each block has two sums modulo 2^64. With the odd keys k and k' of a word's position in the block:

    low = sum k w        high = sum k' floor(w / 2^32)

The digest is XXH3-128 of all sums in order and of the number of bytes. The sums are a 512th of the bytes, and
only the sums leave the device.

**Bound.** Compare two contents of a block. Let d be the difference of their words at a position, and t the
smallest number of zero bits at the end of any nonzero d. If a low half differs, t is below 32. Take a
position whose d ends in t zeros. The two `low` are equal only if k d has one certain value, which the other
keys decide. This fixes all but t of the 63 free bits of k. So the two `low` are equal with probability
2^(t-63), at most 2^-32. If only high halves differ, the same is true of `high`. Changes to the last bits of
both halves are missed with probability 2^-126. The probability is over the keys, for a change that does not
depend on the keys. A changed order of blocks is missed with probability 2^-128, by XXH3.

**Certain.** Every flip of one bit changes a sum, because the keys are odd. Every exchange of two elements of
1, 2, 4 or 8 bytes within a block changes a sum: the difference of two keys ends in less than 33 zeros.

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
    """(2, WORDS): the keys of `low`, the keys of `high`."""
    z = np.arange(1, 2 * WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ z >> np.uint64(shift)) * np.uint64(factor)
    return ((z ^ z >> np.uint64(31)) | np.uint64(1)).reshape(2, WORDS)


KEYS = _keys()


def block_sums(words: Any, keys: Any) -> tuple[Any, Any]:
    """(low, high), each (blocks,), of `words` (blocks, WORDS) and `keys` (2, WORDS): int64 arrays of one
    library, where integers wrap. JAX needs `enable_x64`."""
    low = (words * keys[0]).sum(-1)
    high = (((words >> 32) & 0xFFFFFFFF) * keys[1]).sum(-1)
    return low, high


def finished(sums: Any, num_bytes: int) -> str:
    """The digest of `num_bytes` bytes. `sums`: a buffer of (blocks, 2) int64: low and high."""
    state = xxhash.xxh3_128(sums)
    state.update(num_bytes.to_bytes(8, "little"))
    return state.hexdigest()


class Multilinear:
    """The digest of bytes that come in buffers of any size, with the interface of xxhash's states."""

    def __init__(self) -> None:
        self._state, self._tail, self._num_bytes = xxhash.xxh3_128(), b"", 0
        self._high = np.empty((BAND, WORDS), np.uint64)

    def update(self, data: Any) -> None:
        """`data`: contiguous bytes."""
        new = np.frombuffer(data, np.uint8)
        self._num_bytes += len(new)
        if self._tail:
            missing = BLOCK_BYTES - len(self._tail)
            self._tail += new[:missing].tobytes()
            new = new[missing:]
            if len(self._tail) < BLOCK_BYTES:
                return
            self._take(np.frombuffer(self._tail, np.uint8))
        end = len(new) - len(new) % BLOCK_BYTES
        self._take(new[:end])
        self._tail = new[end:].tobytes()

    def hexdigest(self) -> str:
        state = self._state.copy()
        if self._tail:
            state.update(self._sums(np.frombuffer(self._tail.ljust(BLOCK_BYTES, b"\0"), np.uint8)))
        state.update(self._num_bytes.to_bytes(8, "little"))
        return state.hexdigest()

    def _take(self, blocks: NDArray[np.uint8]) -> None:
        band_bytes = BAND * BLOCK_BYTES
        for start in range(0, len(blocks), band_bytes):
            self._state.update(self._sums(blocks[start : start + band_bytes]))

    def _sums(self, blocks: NDArray[np.uint8]) -> memoryview:
        """(blocks, 2). As `block_sums`, without temporary arrays."""
        words = blocks.view("<u8").reshape(-1, WORDS)
        sums, high = np.empty((len(words), 2), np.uint64), self._high[: len(words)]
        np.einsum("bw,w->b", words, KEYS[0], out=sums[:, 0])
        np.right_shift(words, HALF, out=high)
        np.einsum("bw,w->b", high, KEYS[1], out=sums[:, 1])
        return sums.data
