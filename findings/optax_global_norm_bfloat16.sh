#!/usr/bin/env bash
# optax 0.2.8 (jax 0.10.2): global_norm of bfloat16 gradients stops growing, so clip_by_global_norm does not clip.
#
# Expected. The documentation of clip_by_global_norm: `max_norm` is "the maximum global norm for an update". So what comes
#   out has at most this norm, up to the rounding of bfloat16 (0.4 %).
# Seen. The squares of the leaves are added one leaf after the other in bfloat16. As soon as the sum is 256 times larger
#   than the square of one leaf, adding it changes nothing. With 600 leaves of equal size the norm is 27 % too small,
#   with 2,400 leaves 63 %. The "clipped" gradients have 1.37 and 2.74 times the permitted norm.
# Output.
#    600 leaves: norm  7.75, in bfloat16  5.66; after clip_by_global_norm(1.0):  1.37
#   2400 leaves: norm 15.51, in bfloat16  5.66; after clip_by_global_norm(1.0):  2.74
# Why it matters. A model of 64 layers with separate parameters has 600 leaves and more. The norm in the plot and the
#   norm that is clipped are both wrong, and the error grows with the number of leaves, not with the model's size: a
#   stacked and an unstacked form of one model are clipped differently. Cast gradients to float32 before clipping.
set -euo pipefail
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
{ python3 -m venv "$venv" && "$venv/bin/pip" install -q optax==0.2.8 jax==0.10.2 jaxlib==0.10.2 numpy==2.3.5; } || exit 2

JAX_PLATFORMS=cpu "$venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import optax

clip = optax.clip_by_global_norm(1.0)


def norms(leaves):
    gradients = {f"layer_{index}": jnp.full(1000, 0.01, jnp.bfloat16) for index in range(leaves)}
    exact = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradients)
    clipped, _ = clip.update(gradients, clip.init(gradients))
    after = optax.global_norm(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), clipped))
    values = float(optax.global_norm(exact)), float(optax.global_norm(gradients)), float(after)
    print("{:4} leaves: norm {:5.2f}, in bfloat16 {:5.2f}; after clip_by_global_norm(1.0): {:5.2f}".format(leaves, *values))
    return values


exact, seen, after = norms(600)
assert seen < 0.8 * exact and after > 1.3, "changed: the norm of 600 leaves is right"
exact, seen, after = norms(2400)
assert seen < 0.4 * exact and after > 2.5, "changed: the norm of 2,400 leaves is right"
PY
