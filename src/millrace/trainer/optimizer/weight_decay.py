"""Which parameters have weight decay. It would pull biases, and the scales of norms, to 0."""

from __future__ import annotations

import re

_ROLES = r"biase?s?|ln|sinks?|scales?|gamma|beta|magnitude|[a-z]*norm"
_BIAS_OR_SCALE = re.compile(rf"(^|[._])({_ROLES})\d*(_[^.]*)?(\.[^.]*)?$|(^|\.)(a_log|d)$", re.IGNORECASE)


def decays(name: str, ndim: int) -> bool:
    """Whether the parameter `name` of one layer, which has `ndim` dimensions there, has weight decay.

    It is a matrix, and no bias or scale by its own name or by that of its module. Dimensions do not tell: the
    biases of all experts, or the norms of all heads, may be one matrix. `A_log` and `D` are of state space
    models."""
    return ndim > 1 and not _BIAS_OR_SCALE.search(name)
