"""Least squares with coefficients that are not negative, such as times."""

from __future__ import annotations

from collections.abc import Sequence

Row = Sequence[float]


def fit(rows: Sequence[Row], targets: Sequence[float]) -> list[float]:
    """Coefficients c >= 0 with sum_i (rows_i . c - targets_i)^2 about as small as can be.

    Solves the normal equations. While a coefficient is negative, the most negative coefficient is fixed at 0
    and the others are solved again. A column of zeros gets 0.

    Shapes:
        rows     (N, K), targets (N,); returns (K,)
    """
    width = len(rows[0]) if rows else 0
    active = [k for k in range(width) if any(row[k] for row in rows)]
    while active:
        solution = _solve(rows, targets, active)
        if solution is None:
            active.pop()
            continue
        worst = min(range(len(active)), key=lambda i: solution[i])
        if solution[worst] >= 0:
            return [dict(zip(active, solution, strict=True)).get(k, 0.0) for k in range(width)]
        active.pop(worst)
    return [0.0] * width


def _solve(rows: Sequence[Row], targets: Sequence[float], columns: list[int]) -> list[float] | None:
    """Gaussian elimination with pivoting; None if the columns are linearly dependent."""
    size = len(columns)
    scale = [max(abs(row[k]) for row in rows) for k in columns]
    scaled = [[row[k] / scale[i] for i, k in enumerate(columns)] for row in rows]
    table = [
        [sum(row[i] * row[j] for row in scaled) for j in range(size)]
        + [sum(row[i] * target for row, target in zip(scaled, targets, strict=True))]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(table[r][i]))
        table[i], table[pivot] = table[pivot], table[i]
        if abs(table[i][i]) < 1e-9 * len(rows):
            return None
        for r in range(size):
            if r != i:
                factor = table[r][i] / table[i][i]
                table[r] = [a - factor * b for a, b in zip(table[r], table[i], strict=True)]
    return [table[i][size] / table[i][i] / scale[i] for i in range(size)]
