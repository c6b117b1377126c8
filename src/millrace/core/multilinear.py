"""A digest that a GPU computes where the bytes are: sums of integer products, equal in numpy, torch and JAX.

The hash reads little-endian words w of 8 bytes, in blocks of `WORDS` words. Zeros fill the last block. Each
block has two sums modulo 2^64. A word's place in the block has two odd keys, k and k':

    low = sum k w        high = sum k' floor(w / 2^32)

The digest is XXH3-128 of all sums in order and of the number of bytes. The sums have a 512th of the bytes,
and only the sums leave the device.

**Bound.** A change adds a difference d to each word of a block. Every d ends in at least t zero bits, and one
d ends in exactly t. If a low half changes, t is below 32. `low` stays the same only if k d, at the place of
that one d, equals the value that the other keys leave. The equation fixes all but t of the 63 free bits of k.
So `low` stays the same with probability 2^(t-63), at most 2^-32. If only high halves change, the same holds
for `high`. A change of the last bits of both halves is missed with probability 2^-126. The probabilities are
over the keys, for a change that does not depend on the keys. A change of the order of blocks is missed by
XXH3 with probability 2^-128.

**Certain.** Every flip of one bit changes a sum, because the keys are odd. Every exchange of two elements of
1, 2, 4 or 8 bytes within a block changes a sum: the difference of two keys ends in fewer than 33 zeros.

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
BAND = 64  # blocks summed at a time: they stay in the cache
HALF = np.uint64(32)

Words = NDArray[np.uint64]


def _keys() -> Words:
    """(2, WORDS): the keys of `low`, then the keys of `high`."""
    z = np.arange(1, 2 * WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ z >> np.uint64(shift)) * np.uint64(factor)
    return ((z ^ z >> np.uint64(31)) | np.uint64(1)).reshape(2, WORDS)


KEYS = _keys()


def block_sums(words: Any, keys: Any) -> tuple[Any, Any]:
    """(low, high), each (blocks,), of `words` (blocks, WORDS) and `keys` (2, WORDS). All are int64 arrays of
    one library, where sums wrap. JAX needs `enable_x64`."""
    low = (words * keys[0]).sum(-1)
    high = (((words >> 32) & 0xFFFFFFFF) * keys[1]).sum(-1)
    return low, high


def finished(sums: Any, num_bytes: int) -> str:
    """The digest of `num_bytes` bytes. `sums`: a buffer of (blocks, 2) int64: low and high."""
    state = xxhash.xxh3_128(sums)
    state.update(num_bytes.to_bytes(8, "little"))
    return state.hexdigest()


class Multilinear:
    """The digest of bytes that come in chunks of any size. Its methods are those of a state of xxhash."""

    def __init__(self) -> None:
        self._state, self._tail, self._num_bytes = xxhash.xxh3_128(), b"", 0
        self._high = np.empty((BAND, WORDS), np.uint64)

    def update(self, data: Any) -> None:
        """`data`: contiguous bytes."""
        chunk = np.frombuffer(data, np.uint8)
        self._num_bytes += len(chunk)
        if self._tail:
            missing = BLOCK_BYTES - len(self._tail)
            self._tail += chunk[:missing].tobytes()
            chunk = chunk[missing:]
            if len(self._tail) < BLOCK_BYTES:
                return
            self._add(np.frombuffer(self._tail, np.uint8))
        end = len(chunk) - len(chunk) % BLOCK_BYTES
        self._add(chunk[:end])
        self._tail = chunk[end:].tobytes()

    def hexdigest(self) -> str:
        state = self._state.copy()
        if self._tail:
            state.update(self._sums(np.frombuffer(self._tail.ljust(BLOCK_BYTES, b"\0"), np.uint8)))
        state.update(self._num_bytes.to_bytes(8, "little"))
        return state.hexdigest()

    def _add(self, blocks: NDArray[np.uint8]) -> None:
        step = BAND * BLOCK_BYTES
        for start in range(0, len(blocks), step):
            self._state.update(self._sums(blocks[start : start + step]))

    def _sums(self, blocks: NDArray[np.uint8]) -> memoryview:
        """(blocks, 2), as `block_sums`. The high halves go into the memory of `_high`."""
        words = blocks.view("<u8").reshape(-1, WORDS)
        sums, high = np.empty((len(words), 2), np.uint64), self._high[: len(words)]
        np.einsum("bw,w->b", words, KEYS[0], out=sums[:, 0])
        np.right_shift(words, HALF, out=high)
        np.einsum("bw,w->b", high, KEYS[1], out=sums[:, 1])
        return sums.data
