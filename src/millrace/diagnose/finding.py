"""A finding of the doctor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHOWN = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault: its name, its evidence, and advice."""

    fault: str
    evidence: tuple[str, ...]
    advice: tuple[str, ...]


def withdrawn(fault: str, first: int, last: int) -> str:
    """The text for a fault that a run had from version `first` to `last`, and has no more."""
    versions = f"for versions {first} to {last}" if last > first else f"at version {first}"
    return f"{fault} held {versions}; gone since"


def few(numbers: Sequence[int], noun: str) -> str:
    """`versions 3, 4, 5 and 7 more`."""
    shown = ", ".join(map(str, numbers[:SHOWN]))
    rest = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return f"{noun}{'s' if len(numbers) != 1 else ''} {shown}{rest}"
