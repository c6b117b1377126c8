"""The row of each group: a seeded shuffle per epoch, without memory and without state."""

from __future__ import annotations

import hashlib

ROUNDS = 4


def row_of(group_id: int, rows: int, seed: int | str) -> int:
    """The row of a group: every row once per epoch of `rows` groups, each epoch in another order.

    A pure function of its arguments, so that a resumed run, and every worker, gets the same row.
    """
    epoch, position = divmod(group_id, rows)
    return permuted(position, rows, f"{seed}/{epoch}")


def permuted(position: int, size: int, key: str) -> int:
    """The image of `position` in a pseudo-random permutation of range(size). Constant time and memory.

    A balanced Feistel network over the next power of four, walked until it lands inside the range
    (under four rounds of the network on average).

    Source:
        Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002 (cycle walking).
    """
    half_bits = max(1, -(-(size - 1).bit_length() // 2))
    while True:
        position = _feistel(position, half_bits, key)
        if position < size:
            return position


def _feistel(value: int, half_bits: int, key: str) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for round_index in range(ROUNDS):
        mixed = hashlib.blake2b(f"{key}/{round_index}/{right}".encode(), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(mixed, "little") & mask)
    return left << half_bits | right
