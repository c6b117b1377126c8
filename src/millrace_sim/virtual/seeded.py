"""Randomness as a pure function of a seed and a key: independent of order, process and hash seed."""

from __future__ import annotations

import random
from statistics import NormalDist

import msgspec
import xxhash

_STANDARD_NORMAL = NormalDist()
_BITS = 53

Key = int | str


def _bits(seed: int, key: tuple[Key, ...]) -> int:
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode((seed, *key)))


def stream(seed: int, *key: Key) -> random.Random:
    """A generator for `key`. Its owner fixes the order of the draws."""
    return random.Random(_bits(seed, key))


def uniform(seed: int, *key: Key) -> float:
    """In (0, 1), both ends excluded."""
    return ((_bits(seed, key) >> (64 - _BITS)) + 0.5) / (1 << _BITS)


def normal(seed: int, *key: Key) -> float:
    """Mean 0, variance 1."""
    return _STANDARD_NORMAL.inv_cdf(uniform(seed, *key))
