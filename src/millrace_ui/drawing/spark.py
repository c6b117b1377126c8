"""A small curve without axes."""

from __future__ import annotations

from collections.abc import Sequence


def spark(values: Sequence[float], width: int, height: int) -> str:
    """A curve as SVG, its least value at the bottom. Empty: there is no value."""
    if not values:
        return ""
    low, high = min(values), max(values)
    across, up = width / max(1, len(values) - 1), (height - 4) / ((high - low) or 1.0)
    points = " ".join(f"{i * across:.1f},{height - 2 - (v - low) * up:.1f}" for i, v in enumerate(values))
    label = f"from {values[0]:.3g} to {values[-1]:.3g}"
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{label}"><polyline points="{points}" fill="none" stroke="#3a86d1" stroke-width="2"/>'
        "</svg>"
    )
