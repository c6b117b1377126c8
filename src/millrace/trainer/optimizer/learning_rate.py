"""The learning rate: a pure function of the version, so that a repeated step is the same step."""

from __future__ import annotations

import math

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
