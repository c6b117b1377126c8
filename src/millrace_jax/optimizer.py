"""AdamW on trees with stacked layers, and the norm of a gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from millrace.algorithms.advantages import Critic
from millrace.config.tables.training import Optimizer
from millrace.core.errors import ConfigError
from millrace.trainer.batch.batch_step import decays
from millrace_jax.weights import LAYERS, Tree

Array = Any
HEAD_BETAS = (0.9, 0.999)  # of the critic's optimizer


class TrainingState(NamedTuple):
    """Everything that an update changes. `head`: the critic's weight (M,) and bias (); None: no critic."""

    weights: Tree
    moments: optax.OptState
    head: Tree | None = None
    head_moments: optax.OptState | None = None


def refuse_other(config: Optimizer) -> None:
    """Raises: ConfigError: the optimizer is not AdamW with moments in float32."""
    for key, value, only in (("rule", config.rule, "adamw"), ("states", config.states, "float32")):
        if value != only:
            raise ConfigError(
                f'`optimizer.{key}` ("{value}"): the trainer in JAX has "{only}" alone.\n'
                f'  Set it to "{only}", or `trainer.backend` to "torch"'
            )


def shardings(state: TrainingState, weights: Tree, config: Optimizer, whole: NamedSharding) -> TrainingState:
    """How a state lies on a mesh. Moments lie as their weights do, whose shardings are `weights`, and the
    rest is `whole` on each device."""
    moments = optax.tree_map_params(
        _adam(config), lambda _, where: where, state.moments, weights, transform_non_params=lambda _: whole
    )
    head = jax.tree.map(lambda _: whole, state[2:])
    return TrainingState(weights, moments, *head)


def begin(weights: Tree, config: Optimizer, critic: Critic | None, hidden_size: int) -> TrainingState:
    """The state before the first update. The critic begins at 0."""
    moments = _adam(config).init(weights)
    if critic is None:
        return TrainingState(weights, moments)
    head = {"weight": jnp.zeros(hidden_size), "bias": jnp.zeros(())}
    return TrainingState(weights, moments, head, optax.scale_by_adam(*HEAD_BETAS).init(head))


def norm_of(gradient: Any) -> Array:
    """Euclidean norm of all arrays of a tree together, at least float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(gradient)))


def updated(
    state: TrainingState,
    gradients: tuple[Tree, Tree | None],
    lr: Array,
    norm: Array,
    config: Optimizer,
    head_lr: float,
) -> TrainingState:
    """One step of AdamW. `norm`: of the gradient of the weights, which is clipped. As torch's AdamW: decay is
    decoupled, and epsilon is added to the square root."""
    gradient, of_head = gradients
    if config.grad_clip is not None:
        scale = jnp.minimum(1.0, config.grad_clip / (norm + 1e-6))
        gradient = jax.tree.map(lambda g: g * scale, gradient)
    steps, moments = _adam(config).update(gradient, state.moments, state.weights)

    def moved(name: str, weight: Array, step: Array, layered: bool) -> Array:
        decay = config.weight_decay if decays(name, weight.ndim - layered) else 0.0
        return weight - lr * (step + decay * weight)

    weights = {
        **{name: moved(name, x, steps[name], False) for name, x in state.weights.items() if name != LAYERS},
        LAYERS: {
            name: moved(name, x, steps[LAYERS][name], True) for name, x in state.weights[LAYERS].items()
        },
    }
    if state.head is None or of_head is None:
        return TrainingState(weights, moments)
    head_steps, head_moments = optax.scale_by_adam(*HEAD_BETAS).update(of_head, state.head_moments)
    head = jax.tree.map(lambda x, step: x - head_lr * step, state.head, head_steps)
    return TrainingState(weights, moments, head, head_moments)


def _adam(config: Optimizer) -> optax.GradientTransformation:
    return optax.scale_by_adam(*config.betas, eps=config.eps)


def not_finite(weights: Tree) -> dict[str, Array]:
    """By name whether an array has a number that is not finite."""
    arrays = {**weights, **weights[LAYERS]}
    del arrays[LAYERS]
    return {name: ~jnp.isfinite(x).all() for name, x in arrays.items()}
