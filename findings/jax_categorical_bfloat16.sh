#!/usr/bin/env bash
# jax 0.10.2: random.categorical with bfloat16 logits prefers low token ids.
#
# Expected. The documentation: "softmax(logits, axis) gives the corresponding probabilities". It names one limit, for
#   float32: a bias below a probability of 1E-7. So 1,024 equal logits give each token 1/1024, in every number format.
# Seen. The Gumbel noise is drawn in the format of the logits. bfloat16 has so few values that many tokens share the
#   largest sum, and argmax takes the first of them. The lowest 64 ids get 40 % of the samples instead of 6.25 %. The
#   highest 64 ids get 0.02 %. mode="high", which is not the default, helps.
# Output.
#   float32  mode=low   lowest 64 ids  6.3%  highest 64 ids  6.3%  ids never sampled    0
#   bfloat16 mode=low   lowest 64 ids 39.5%  highest 64 ids  0.0%  ids never sampled   64
#   bfloat16 mode=high  lowest 64 ids  6.4%  highest 64 ids  6.1%  ids never sampled    0
# Why it matters. Models in JAX give bfloat16 logits. A sampler that passes them on as they are samples from another
#   distribution than the one whose log-probs the trainer computes. Importance weights are then wrong for every token,
#   the upper end of the vocabulary is not explored, and no error is raised. Cast to float32 before sampling.
set -euo pipefail
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
{ python3 -m venv "$venv" && "$venv/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2 numpy==2.3.5; } || exit 2

JAX_PLATFORMS=cpu "$venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np

TOKENS, SAMPLES, EDGE = 1024, 200_000, 64


def shares(dtype, mode):
    ids = jax.random.categorical(jax.random.key(0), jnp.zeros(TOKENS, dtype), shape=(SAMPLES,), mode=mode)
    counts = np.bincount(np.asarray(ids), minlength=TOKENS)
    low, high = counts[:EDGE].sum() / SAMPLES, counts[-EDGE:].sum() / SAMPLES
    print(
        f"{jnp.dtype(dtype).name:8} mode={mode:5} lowest {EDGE} ids {low:5.1%}  highest {EDGE} ids {high:5.1%}"
        f"  ids never sampled {(counts == 0).sum():4}"
    )
    return low, high


low, high = shares(jnp.float32, "low")
assert abs(low - EDGE / TOKENS) < 0.01 and abs(high - EDGE / TOKENS) < 0.01, "float32 is no longer uniform"
low, high = shares(jnp.bfloat16, "low")
assert low > 0.2 and high < 0.02, "changed: bfloat16 is nearer to uniform"
low, high = shares(jnp.bfloat16, "high")
assert low < 0.08 and high > 0.05, "mode=high is no longer near to uniform"
PY
