"""A reward that random weights get as often as not."""

from __future__ import annotations


def parity(completion: str, answer: object, **columns: object) -> float:
    """Whether the completion has an even sum of characters."""
    return float(sum(map(ord, completion)) % 2)
