"""From configuration to an algorithm: an advantage, an objective and a normalisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from millrace.algorithms.advantages import (
    Critic,
    group_advantages,
    sequence_advantages,
    turn_advantages,
    value_advantages,
    value_loss,
    whitened,
)
from millrace.algorithms.corrections import within_second_moment
from millrace.algorithms.group import ComparedGroup, overlong_penalty, selected
from millrace.algorithms.logprobs import kl
from millrace.algorithms.objective import policy_gradient
from millrace.config.objects import load_object
from millrace.config.schema import Config
from millrace.config.tables import algorithms as config_of
from millrace.config.tables.algorithms import FunctionAlgorithm, PolicyGradient
from millrace.core.errors import ConfigError

Advantages = NDArray[Any] | Sequence[NDArray[Any]]
Normalize = Literal["sequence", "token", "max_tokens"]
Proximal = Literal["recompute", "interpolate"]
WeightOf = Literal["token", "product", "mean"]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What a trainer needs to know. Masking, weighting, packing and reduction are the trainer's.

    advantages       a `ComparedGroup` -> (G,) advantages, or for each trajectory one for each of its tokens
    objective        (xp, TokenLogprobs, advantages_N) -> (N,) loss of each token. Tokens are combined by
                     `TokenLogprobs.sequences` alone: a micro-batch may hold any of them
    normalize        the weight of a token: see `millrace.trainer.batch.flat_batch`
    gain             `objective` without penalties, which tells the tokens that a clip silences from those
                     that only a penalty moves; None: the objective has no penalty
    weight_cap       where the importance weight is truncated, for the metrics; None: nowhere
    weight_of        that weight, of each token: its own ratio, or that of its sequence, as the product or
                     the geometric mean of its ratios
    needs_reference  the objective looks at `reference_N`, or there is a `penalty`
    trained          a `ComparedGroup` -> (G,) which trajectories are trained; None: all. The others are
                     masked, and count nowhere but in the group that `advantages` is given. Both see the same
                     rewards: less the `penalty`, where there is one
    whole_batch      (N,) advantages of all trained tokens of a batch -> (N,) those that are used
    loss_mask        (proximal_N, behavior_N, advantages_N) of all trained tokens of a batch -> (N,) which are
                     in the loss. It is settled before the first gradient, and costs a forward pass
    penalty          (proximal_N, reference_N) of tokens -> (N,) what each takes off the reward of its
                     trajectory. It costs a forward pass
    proximal         where a batch gets several optimizer steps: "recompute", a forward pass at its beginning
                     finds `proximal_N`; "interpolate", it lies between `behavior_N` and `fixed_N`
    compares_sequences  the objective looks at `TokenLogprobs.sequences`: a trajectory is in one row
    critic           `ComparedGroup.values` are this critic's, by a forward pass before the first gradient
    """

    advantages: Callable[[ComparedGroup], Advantages]
    objective: Callable[..., Any]
    normalize: Normalize = "token"
    gain: Callable[..., Any] | None = None
    weight_cap: float | None = None
    weight_of: WeightOf = "token"
    needs_reference: bool = False
    trained: Callable[[ComparedGroup], NDArray[np.bool_]] | None = None
    whole_batch: Callable[[NDArray[Any]], NDArray[Any]] | None = None
    loss_mask: Callable[[NDArray[Any], NDArray[Any], NDArray[Any]], NDArray[Any]] | None = None
    penalty: Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]] | None = None
    proximal: Proximal = "recompute"
    critic: Critic | None = None
    compares_sequences: bool = True


def of_run(config: Config) -> Algorithm:
    """The algorithm of a run. Raises: ConfigError: it cannot be loaded, or not be trained so."""
    algorithm = build(config.algorithm)
    if algorithm.critic is not None and config.trainer.offload:
        raise ConfigError(
            f'`algorithm.kind` ("{config.algorithm.kind}") has a critic: it lies where the model computes, '
            "and `trainer.offload` (true) keeps weights elsewhere.\n  Set `trainer.offload` to false"
        )
    return algorithm


def build(config: config_of.Algorithm) -> Algorithm:
    """The algorithm of a configuration."""
    if isinstance(config, FunctionAlgorithm):
        return _own(config.path)
    weight_cap, weight_of = _capped(config)
    unpenalised = config.model_copy(update={"kl": 0.0})
    kl_in, most = config.kl_in if config.kl > 0 else "", config.second_moment
    return Algorithm(
        advantages=partial(_advantages, config=config),
        objective=partial(policy_gradient, config=config),
        normalize=config.normalize,
        gain=partial(policy_gradient, config=unpenalised) if kl_in == "loss" else None,
        weight_cap=weight_cap,
        weight_of=weight_of,
        needs_reference=config.kl > 0 or config.teacher is not None,
        trained=partial(_trained, config=config),
        whole_batch=whitened if config.scale == "batch" else None,
        loss_mask=None if most is None else partial(within_second_moment, most=most),
        penalty=partial(_penalty, config=config) if kl_in == "reward" else None,
        proximal=config.proximal if _has_proximal(config) else "interpolate",
        critic=_critic(config) if config.baseline == "value" else None,
        compares_sequences="sequence" in (config.ratio, config.correction_of) or config.drift is not None,
    )


def _critic(config: PolicyGradient) -> Critic:
    return Critic(partial(value_loss, clip=config.value_clip), config.value_lr, config.value_trunk)


def _capped(config: PolicyGradient) -> tuple[float | None, WeightOf]:
    """Where the weight of what another policy sampled is truncated, and of which probabilities it is."""
    if config.clip in ("weight", "tv", "kl") and config.anchor == "behavior":
        return config.rho, "mean" if config.ratio == "sequence" else "token"
    return config.correction, "product" if config.correction_of == "sequence" else "token"


def _has_proximal(config: PolicyGradient) -> bool:
    """The objective looks at the proximal policy: otherwise no pass has to find it."""
    return config.anchor == "proximal" or config.correction is not None or config.teacher is not None


def _advantages(group: ComparedGroup, config: PolicyGradient) -> Advantages:
    """Of the trajectories that `select` leaves; 0 of the others."""
    if config.baseline == "value":
        shaped = group.minus(overlong_penalty(group, fraction=config.overlong))
        return value_advantages(shaped, discount=config.discount, gae_lambda=config.gae_lambda)
    kept_G = selected(group, select=config.select, keep=config.keep)
    found_G, compared = np.zeros(kept_G.size), group.part(kept_G)
    if not kept_G.any():
        return found_G
    shaped = compared.minus(overlong_penalty(compared, fraction=config.overlong))
    scale, baseline = "none" if config.scale == "batch" else config.scale, config.baseline
    if config.turn_discount is not None:
        found = turn_advantages(shaped, scale=scale, baseline=baseline, discount=config.turn_discount)
    elif config.sequence_share > 0:
        found = sequence_advantages(shaped, scale=scale, baseline=baseline, share=config.sequence_share)
    else:
        found_G[kept_G] = group_advantages(shaped, scale=scale, baseline=baseline)
        return found_G
    of_kept = iter(found)
    return [next(of_kept) if kept else np.zeros(1) for kept in kept_G]


def _trained(group: ComparedGroup, config: PolicyGradient) -> NDArray[np.bool_]:
    kept_G = selected(group, select=config.select, keep=config.keep)
    return kept_G & ~group.truncated_G if config.truncated == "mask" else kept_G


def _penalty(proximal_N: NDArray[Any], reference_N: NDArray[Any], config: PolicyGradient) -> NDArray[Any]:
    found: NDArray[Any] = kl(np, proximal_N, reference_N, estimator=config.kl_estimator)
    return config.kl * found


def _own(path: str) -> Algorithm:
    algorithm, _ = load_object("algorithm.path", path)
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(
            f"`algorithm.path` ({path!r}) is of type {type(algorithm).__name__}, "
            "not a millrace.algorithms.Algorithm"
        )
    if algorithm.penalty is not None and not algorithm.needs_reference:
        raise ConfigError(
            f"`algorithm.path` ({path!r}) has a `penalty`, which is given log-probs of the reference.\n"
            "  Set its `needs_reference` to true"
        )
    return algorithm
