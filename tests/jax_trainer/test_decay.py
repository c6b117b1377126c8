"""Weight decay in JAX, where each array holds a tensor of all layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from millrace.config.tables.training import Optimizer
from millrace_jax import optimizer
from millrace_jax.weights import HEAD, LAYERS, NORM

LAYERED = {
    "self_attn.q_proj.weight": ((3, 4, 4), 0.99),
    "mlp.experts.down_proj": ((3, 2, 4, 4), 0.99),
    "mlp.experts.down_proj_bias": ((3, 2, 4), 1.0),
    "self_attn.q_proj.bias": ((3, 4), 1.0),
    "self_attn.q_norm.weight": ((3, 2, 4), 1.0),
    "input_layernorm.weight": ((3, 4), 1.0),
    "self_attn.sinks": ((3, 2), 1.0),
    "self_attn.q_proj.lora_A": ((3, 2, 4), 0.99),
}
OUTSIDE = {HEAD: ((4, 4), 0.99), NORM: ((4,), 1.0)}


@pytest.mark.parametrize("name", [*LAYERED, *OUTSIDE])
def test_a_weight_decay_shrinks_matrices_of_layers_and_leaves_biases_and_scales(name: str) -> None:
    config = Optimizer(lr=0.1, weight_decay=0.1)
    outside = {key: jnp.ones(shape) for key, (shape, _) in OUTSIDE.items()}
    weights = outside | {LAYERS: {key: jnp.ones(shape) for key, (shape, _) in LAYERED.items()}}
    state = optimizer.begin(weights, config, None, 4)
    gradient = jax.tree.map(jnp.zeros_like, weights)
    updated = optimizer.updated(state, (gradient, None), jnp.asarray(0.1), jnp.asarray(0.0), config, 0.0)
    tree, described = (updated.weights[LAYERS], LAYERED) if name in LAYERED else (updated.weights, OUTSIDE)
    np.testing.assert_allclose(tree[name], described[name][1], rtol=1e-6)
