"""From configuration to an algorithm: an advantage, a per-token objective and a normalisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from millrace.algorithms.advantages import group_advantages
from millrace.algorithms.aipo import aipo_objective
from millrace.algorithms.group import Group
from millrace.algorithms.grpo import grpo_objective
from millrace.config import training
from millrace.config.objects import load_object
from millrace.config.training import AIPO, GRPO, DrGRPO, FunctionAlgorithm
from millrace.core.errors import ConfigError

Advantages = NDArray[Any] | Sequence[NDArray[Any]]
Proximal = Literal["recompute", "interpolate"]
Normalize = Literal["sequence", "token", "max_tokens"]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What a trainer needs to know. Masking, weighting, packing and reduction are the trainer's.

    advantages       a `Group` -> (G,) advantages, or for each trajectory one for each of its tokens
    objective        (xp, TokenLogprobs, advantages_N) -> (N,) loss of each token. Tokens are combined by
                     `TokenLogprobs.sequences` alone: a micro-batch may hold any of them
    normalize        the weight of a token: see `millrace.trainer.reduction`
    weight_cap       where the importance weight is truncated, for the metrics; None: nowhere
    needs_reference  the objective looks at `reference_N`
    trained          a `Group` -> (G,) which of its trajectories are trained; None: all. The others are
                     masked, and count nowhere but in the group that `advantages` is given
    proximal         where a batch gets several optimizer steps: "recompute", a forward pass at its beginning
                     finds `proximal_N`; "interpolate", it lies between `behavior_N` and `fixed_N`
    """

    advantages: Callable[[Group], Advantages]
    objective: Callable[..., Any]
    normalize: Normalize = "token"
    weight_cap: float | None = None
    needs_reference: bool = False
    trained: Callable[[Group], NDArray[np.bool_]] | None = None
    proximal: Proximal = "recompute"


def build(config: training.Algorithm) -> Algorithm:
    """The algorithm of a configuration.

    Dr. GRPO (arXiv:2503.20783) is GRPO without the division by the standard deviation, with token
    losses summed and divided by the constant sequences x max_tokens instead of by lengths.
    AIPO's paper sums over tokens; we divide the sum by the batch's trained tokens, which scales the
    gradient of a batch and never the share of a token in it.
    """
    match config:
        case AIPO():
            return Algorithm(
                advantages=partial(group_advantages, scale="none"),
                objective=partial(aipo_objective, rho=config.rho),
                normalize="token",
                weight_cap=config.rho,
                needs_reference=False,
            )
        case DrGRPO():
            return _clipped(config, scale="none", normalize="max_tokens", kl=0.0)
        case FunctionAlgorithm():
            return _own(config.path)
        case GRPO():
            return _clipped(config, scale=config.scale, normalize=config.normalize, kl=config.kl)


def _clipped(
    config: GRPO | DrGRPO, *, scale: Literal["std", "none"], normalize: Normalize, kl: float
) -> Algorithm:
    return Algorithm(
        advantages=partial(group_advantages, scale=scale),
        objective=partial(
            grpo_objective,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            correction=config.correction,
            kl=kl,
        ),
        normalize=normalize,
        weight_cap=config.correction,
        needs_reference=kl > 0,
    )


def _own(path: str) -> Algorithm:
    algorithm, _ = load_object("algorithm.path", path)
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(
            f"`algorithm.path` ({path!r}) is of type {type(algorithm).__name__}, "
            "not a millrace.algorithms.Algorithm"
        )
    return algorithm
