"""The unbiased estimator of pass@k."""

from __future__ import annotations

import math

from millrace.core.errors import DataError


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k completions is correct, from n drawn of which c are.

        1 - C(n - c, k) / C(n, k) = 1 - prod_{i = n-c+1}^{n} (1 - k / i)

    Raises:
        DataError: not 0 <= c <= n or not 1 <= k <= n.
    Degenerate:
        Fewer than k wrong completions -> 1.
    Source:
        Chen et al., arXiv:2107.03374, equation 1.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise DataError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))
