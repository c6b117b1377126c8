"""What the doctor says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHOWN = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault: its name, what shows it, what to change."""

    fault: str
    evidence: tuple[str, ...]
    advice: tuple[str, ...]


def withdrawn(fault: str, first: int, last: int) -> str:
    """What is said of a fault that held from version `first` to `last`, and holds no more."""
    held = f"for versions {first} to {last}" if last > first else f"at version {first}"
    return f"{fault} held {held}; gone since"


def few(numbers: Sequence[int], noun: str) -> str:
    """`versions 3, 4, 5 and 7 more`."""
    shown = ", ".join(map(str, numbers[:SHOWN]))
    rest = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return f"{noun}{'s' if len(numbers) != 1 else ''} {shown}{rest}"
