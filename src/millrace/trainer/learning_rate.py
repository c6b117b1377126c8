"""The learning rate, and which parameters have weight decay. Pure: a repeated step is the same step.

Weight decay would pull biases, and the scales of norms, to 0.
"""

from __future__ import annotations

import math
import re

from millrace.config.tables.training import Optimizer


def learning_rate(config: Optimizer, version: int) -> float:
    """The learning rate of the step from `version` to the next. All optimizer steps of a batch have the same.

    warm-up    lr (version + 1) / warmup_steps
    after it   constant: lr.  With p = (version - warmup_steps) / (decay_steps - warmup_steps) up to 1:
               linear: lr (1 - p (1 - lr_end));  cosine: lr (lr_end + (1 - lr_end) (1 + cos(pi p)) / 2)
    """
    if version < config.warmup_steps:
        return config.lr * (version + 1) / config.warmup_steps
    if config.decay_steps is None:
        return config.lr
    decay_steps = max(1, config.decay_steps - config.warmup_steps)
    progress = min(1.0, (version - config.warmup_steps) / decay_steps)
    scale = 1.0 - progress if config.decay == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.lr_end + (1.0 - config.lr_end) * scale)


_ROLES = r"biase?s?|ln|sinks?|scales?|gamma|beta|magnitude|[a-z]*norm"
_BIAS_OR_SCALE = re.compile(rf"(^|[._])({_ROLES})\d*(_[^.]*)?(\.[^.]*)?$|(^|\.)(a_log|d)$", re.IGNORECASE)


def decays(name: str, ndim: int) -> bool:
    """Whether the parameter `name` of one layer, which has `ndim` dimensions there, has weight decay.

    It is a matrix, and no bias or scale by its own name or by that of its module. Dimensions do not tell: the
    biases of all experts, or the norms of all heads, may be one matrix. `A_log` and `D` are of state space
    models."""
    return ndim > 1 and not _BIAS_OR_SCALE.search(name)
