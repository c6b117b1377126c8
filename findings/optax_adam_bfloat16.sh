#!/usr/bin/env bash
# optax 0.2.8 (jax 0.10.2): the second moment of Adam never falls when parameters are bfloat16.
#
# Expected. The documentation of optax.adam gives v = b2 * v + (1 - b2) * g^2 and an option for the number format of the
#   first moment alone (mu_dtype). After one large gradient, v falls by half in about 700 steps (b2 = 0.999).
# Seen. v has the format of the parameters. In bfloat16, 0.999 * v is nearer to v than to the next smaller number, so
#   each step rounds back to v. One gradient of 1 fixes v for ever. After 10,000 steps with gradients of 0.001, v has
#   not moved, and each update is 30 times too small. mu_dtype=float32 does not help.
# Output.
#   float32  v after one gradient of 1: 1.0e-03  after 10,000 of 0.001: 1.0e-06  update -9.8e-04
#   bfloat16 v after one gradient of 1: 1.0e-03  after 10,000 of 0.001: 1.0e-03  update -3.3e-05
# Why it matters. RL gives rare large gradients: a long trajectory, a first step after a new stage. With bfloat16
#   parameters each one lowers the learning rate of the weights that it touches for the rest of the run. The loss looks
#   as if training had converged. Keep float32 master weights, or keep the state of the optimizer in float32.
set -euo pipefail
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
{ python3 -m venv "$venv" && "$venv/bin/pip" install -q optax==0.2.8 jax==0.10.2 jaxlib==0.10.2 numpy==2.3.5; } || exit 2

JAX_PLATFORMS=cpu "$venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import optax

LR, STEPS = 1e-3, 10_000


def moments(dtype, mu_dtype=None):
    adam = optax.adam(LR, mu_dtype=mu_dtype)
    step = jax.jit(adam.update)
    _, state = step(jnp.ones(4, dtype), adam.init(jnp.ones(4, dtype)))
    first = float(state[0].nu[0])
    small = jnp.full(4, 1e-3, dtype)
    for _ in range(STEPS):
        update, state = step(small, state)
    last, update = float(state[0].nu[0]), float(update[0])
    print(
        f"{jnp.dtype(dtype).name:8} v after one gradient of 1: {first:.1e}  after 10,000 of 0.001: {last:.1e}"
        f"  update {update:.1e}"
    )
    return first, last, update


first, last, update = moments(jnp.float32)
assert last < first / 500 and abs(update + LR) < 0.1 * LR, "float32 is no longer as documented"
for mu_dtype in (None, jnp.float32):
    first, last, update = moments(jnp.bfloat16, mu_dtype)
    assert last == first, "changed: v falls in bfloat16"
    assert abs(update) < LR / 20, "changed: the update has its full size"
PY
