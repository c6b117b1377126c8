"""One published number beside its prediction."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """`calibrates`: a constant was fitted to it, so it is no test of anything. `why`: what differs."""

    source: str
    what: str
    published: float
    predicted: float
    unit: str
    calibrates: bool = False
    why: str = ""

    @property
    def error(self) -> float:
        """Relative, signed."""
        return self.predicted / self.published - 1.0


def largest_error(rows: list[Row]) -> float:
    """Of the rows held out."""
    return max(abs(row.error) for row in rows if not row.calibrates)
