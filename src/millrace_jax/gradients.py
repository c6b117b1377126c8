"""The gradient of a batch's loss, one set of rows at a time. Log-probs of target tokens are computed with
only a chunk of the logits in memory at a time. Token masks, as arrays of few shapes, cut logits off.

`row_outputs` computes log-probs, `token_loss` the loss of tokens from their log-probs. JAX traces both once
for each shape. Shape suffixes: R rows, N trained tokens of a row, K = R x N tokens of a set of rows,
C completion tokens of the batch, S sequences of the batch.

A chunk has every so many-th token, so that each device has a part of each chunk. Its shape suffixes: R rows,
N tokens of a row, M hidden size, V vocabulary; in a token mask (`trainer.recorded`) K
allowed tokens of a row, C tokens of a row in a chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from millrace.algorithms import Algorithm, TokenLogprobs
from millrace.algorithms.corrections import interpolated
from millrace.trainer.batch.flat_batch import FlatBatch
from millrace.trainer.recorded import TokenMasks
from millrace_jax.adapter_tree import beside
from millrace_jax.decoder import Decoder
from millrace_jax.devices.mesh import AXES, ROWS, divided, gathered, size_of
from millrace_jax.forward import hidden_states
from millrace_jax.row_arrays import RowArrays, bucket
from millrace_jax.weights import EMBEDDING, HEAD, Tree

Array = Any
jax.tree_util.register_dataclass(
    RowArrays, [name for name in RowArrays.__annotations__ if name != "band"], ["band"]
)


class Tokens(NamedTuple):
    """Numbers of the trained tokens of a set of rows, (R, N) each. Padding has weight 0 and no sequence."""

    valid: Array
    behavior: Array
    proximal: Array
    reference: Array
    advantages: Array
    weights: Array
    returns: Array
    values: Array  # of the critic at the batch's beginning
    staleness: Array
    after_swap: Array
    sequence: Array
    trained: Array  # tokens of its sequence


class Outputs(NamedTuple):
    """Of the trained tokens, (R, N) each. `values`: of the critic; 0 without one."""

    logprobs: Array
    entropies: Array
    values: Array


class SequenceSums:
    """`algorithms.logprobs.Sequences` of a set of rows. Padding belongs to sequence `count`."""

    def __init__(self, sequence_K: Array, trained_K: Array, count: int) -> None:
        self._sequence_K, self._trained_K, self._count = sequence_K, trained_K, count

    def total(self, x_K: Array) -> Array:
        x_K = jax.lax.stop_gradient(x_K)
        sums = jax.ops.segment_sum(x_K, self._sequence_K, num_segments=self._count + 1)
        return sums[self._sequence_K]

    def mean(self, x_K: Array) -> Array:
        return self.total(x_K) / self._trained_K


_PICKED = (
    "behavior", "proximal", "reference", "advantages", "weights", "returns", "values", "staleness",
    "after_swap",
)  # fmt: skip


def tokens_of(flat: FlatBatch, rows: RowArrays, dtype: Any) -> Tokens:
    """The numbers of the rows' trained tokens, in `dtype`."""
    valid = rows.flat_RN >= 0
    index = np.where(valid, rows.flat_RN, 0)

    def pick(values_C: NDArray[Any]) -> NDArray[Any]:
        return np.where(valid, np.nan_to_num(values_C[index]), 0).astype(dtype)

    sequence = np.where(valid, flat.sequence_C[index], sequences(flat)).astype(np.int32)
    trained = np.where(valid, flat.trained_S[flat.sequence_C[index]], 1).astype(dtype)
    picked = {name: pick(getattr(flat, f"{name}_C")) for name in _PICKED}
    return Tokens(valid=valid, sequence=sequence, trained=trained, **picked)


def sequences(flat: FlatBatch) -> int:
    """Sequences of the batch, up to the next of few numbers."""
    return bucket(len(flat.trained_S))


def row_outputs(
    weights: Tree,
    head: Tree | None,
    rows: RowArrays,
    shape: Decoder,
    *,
    temperature: float,
    recompute: bool,
    trunk: float = 0.0,
    masks: MaskArrays | None = None,
) -> Outputs:
    """`head`: the critic's weight (M,) and bias (). `trunk`: `Critic.trunk`. `masks`: of the rows. On a mesh
    each device has all outputs, and so the loss and its numbers are those of all rows."""
    hidden = hidden_states(weights, shape, rows, recompute=recompute)
    sources = jnp.take_along_axis(divided(hidden, ROWS), rows.sources_RN[..., None], axis=1)
    sources = divided(sources, ROWS, "sequence")
    projection = EMBEDDING if shape.tied else HEAD
    logprobs, entropies = token_logprobs(
        sources,
        gathered(projection, weights[projection]),
        rows.targets_RN,
        temperature=temperature,
        softcap=shape.logits_cap,
        masks=masks,
    )
    values = jnp.zeros_like(logprobs)
    if head is not None:
        fixed = jax.lax.stop_gradient(sources)
        states = (fixed + trunk * (sources - fixed)).astype(values.dtype)
        values = states @ head["weight"] / shape.hidden_size + head["bias"]
    return Outputs(*map(divided, (logprobs, entropies, values)))


def token_loss(
    outputs: Outputs, tokens: Tokens, algorithm: Algorithm, progress: Array, count: int, *, gain: bool = False
) -> Array:
    """The rows' share of the batch's loss. `progress`: the share of the batch's optimizer steps that is done;
    `count`: of `SequenceSums`. `gain`: the loss without penalties and critic."""
    logprobs, advantages_K = policies(outputs, tokens, algorithm, progress, count)
    objective = algorithm.gain if gain and algorithm.gain is not None else algorithm.objective
    objective_K = objective(jnp, logprobs, advantages_K)
    if algorithm.critic is not None and not gain:
        values, before, returns = (x.reshape(-1) for x in (outputs.values, tokens.values, tokens.returns))
        objective_K = objective_K + algorithm.critic.loss(jnp, values, before, returns)
    valid_K = tokens.valid.reshape(-1)
    return jnp.sum(jnp.where(valid_K, objective_K, 0) * tokens.weights.reshape(-1))


def policies(
    outputs: Outputs, tokens: Tokens, algorithm: Algorithm, progress: Array, count: int
) -> tuple[TokenLogprobs, Array]:
    """The log-probs that an objective sees, (K,) each, and the advantages. Padding has log-probs 0."""
    tokens = Tokens(*(x.reshape(-1) for x in tokens))
    current = jnp.where(tokens.valid, outputs.logprobs.reshape(-1), 0)
    fixed = jax.lax.stop_gradient(current)
    later = tokens.proximal
    if algorithm.proximal == "interpolate":
        later = interpolated(fixed, tokens.behavior, tokens.staleness, jnp.maximum(progress, 1e-9))
    return (
        TokenLogprobs(
            current,
            fixed,
            tokens.behavior,
            jnp.where(progress > 0, later, fixed),
            tokens.reference if algorithm.needs_reference else None,
            SequenceSums(tokens.sequence, tokens.trained, count),
            jnp.where(tokens.valid, outputs.entropies.reshape(-1), 0),
        ),
        tokens.advantages,
    )


def rows_gradient(
    weights: Tree,
    head: Tree | None,
    rows: RowArrays,
    tokens: Tokens,
    progress: Array,
    shape: Decoder,
    algorithm: Algorithm,
    count: int,
    base: Tree | None = None,
    **options: Any,
) -> tuple[Array, tuple[Tree, Tree | None], Outputs, Array]:
    """Loss, gradients of `weights` and of `head`, outputs, and the gradient of the gain with respect to the
    log-probs (R, N). `base`: frozen weights, if `weights` are an adapter."""

    def forward(weights: Tree, head: Tree | None) -> Outputs:
        return row_outputs(beside(base, weights), head, rows, shape, **options)

    outputs, backward = jax.vjp(forward, weights, head)
    loss, upstream = jax.value_and_grad(token_loss)(outputs, tokens, algorithm, progress, count)
    of_gain = upstream
    if algorithm.gain is not None:
        of_gain = jax.grad(token_loss)(outputs, tokens, algorithm, progress, count, gain=True)
    return loss, backward(upstream), outputs, of_gain.logprobs


# ---------------------------------------------------------------- log-probs


CHUNK_LOGITS = 1 << 24
"""Logits that a device computes at once: 64 MiB in float32."""


def token_logprobs(
    hidden_RNM: Array,
    weight_VM: Array,
    targets_RN: Array,
    *,
    temperature: float,
    softcap: float | None,
    masks: MaskArrays | None = None,
) -> tuple[Array, Array]:
    """Log-probs of `targets_RN` under softmax(logits / temperature), and that softmax's entropy: (R, N) each,
    at least float32, in nats. With `masks` the softmax is over a token's allowed tokens.

        logits = z | softcap * tanh(z / softcap),   z = hidden weight^T

    Degenerate: N no larger than a chunk -> one chunk, whose logits are kept for the gradient."""
    rows, tokens, size = hidden_RNM.shape
    chunk = chunk_tokens(rows, tokens, weight_VM.shape[0])
    chunks = tokens // chunk

    def of_chunk(hidden: Array, targets: Array, index: Array) -> tuple[Array, Array]:
        wide = jnp.promote_types(hidden.dtype, jnp.float32)
        logits = jnp.einsum("rnm,vm->rnv", hidden, weight_VM, preferred_element_type=wide)
        if softcap is not None:
            logits = jnp.tanh(logits / softcap) * softcap
        logits = logits / temperature
        if masks is not None:
            logits = cut_off(logits, masks, index, chunks)
        logits = divided(logits, ROWS, "sequence", "tensor")
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        here = jnp.arange(logits.shape[-1]) == targets[..., None]  # gathers no divided vocabulary
        chosen = jnp.sum(jnp.where(here, logits, 0), axis=-1)
        probs = jnp.exp(logits - normalizer[..., None])
        return chosen - normalizer, normalizer - jnp.sum(probs * logits, axis=-1)

    if chunk == tokens:
        return of_chunk(hidden_RNM, targets_RN, 0)
    hidden = jnp.moveaxis(hidden_RNM.reshape(rows, chunk, -1, size), 2, 0)
    targets = jnp.moveaxis(targets_RN.reshape(rows, chunk, -1), 2, 0)
    each_chunk = hidden, targets, jnp.arange(chunks)
    outputs = jax.lax.map(lambda each: jax.checkpoint(of_chunk)(*each), each_chunk)
    logprobs, entropies = (jnp.moveaxis(x, 0, 2).reshape(rows, tokens) for x in outputs)
    return logprobs, entropies


def chunk_tokens(rows: int, tokens: int, vocab: int) -> int:
    """Tokens of a row in one chunk: halves of `tokens` until the chunk's logits fit, while they divide it and
    the devices that share a row divide them."""
    logits = CHUNK_LOGITS * size_of(*AXES)
    while tokens % (2 * size_of("sequence")) == 0 and rows * tokens * vocab > logits:
        tokens //= 2
    return tokens


# ---------------------------------------------------------------- token masks


CUT = -1e30
"""The logit of a token that could not be sampled. Finite, so that its share of an entropy is 0."""


class MaskArrays(NamedTuple):
    """`cut_RN`: only allowed tokens stay. Entry k of a row allows `tokens_RK[k]` at its place `places_RK[k]`.
    Padding has the place N."""

    cut_RN: Array
    places_RK: Array
    tokens_RK: Array


def mask_arrays(masks_C: TokenMasks | None, flat_RN: NDArray[np.int64]) -> MaskArrays | None:
    """`masks_C`: of the batch's completion tokens. `flat_RN`: the token at each place of the rows, or -1."""
    if masks_C is None:
        return None
    places = [np.flatnonzero(flat_N >= 0) for flat_N in flat_RN]
    masks = [masks_C.of(flat_N[place]) for flat_N, place in zip(flat_RN, places, strict=True)]
    entries = bucket(max(len(each.tokens_K) for each in masks))
    cut_RN = np.zeros(flat_RN.shape, bool)
    places_RK = np.full((len(masks), entries), flat_RN.shape[1], np.int32)
    tokens_RK = np.zeros((len(masks), entries), np.int32)
    for row, (place, each) in enumerate(zip(places, masks, strict=True)):
        cut_RN[row, place] = each.counts_N > 0
        places_RK[row, : len(each.tokens_K)] = np.repeat(place, each.counts_N)
        tokens_RK[row, : len(each.tokens_K)] = each.tokens_K
    return MaskArrays(cut_RN, places_RK, tokens_RK)


def cut_off(logits_RCV: Array, masks: MaskArrays, chunk: Array, chunks: int) -> Array:
    """The logits of every `chunks`-th token from number `chunk` on. What is not allowed is CUT."""
    rows, tokens, _ = logits_RCV.shape
    here_RK = masks.places_RK % chunks == chunk
    places_RK = jnp.where(here_RK, masks.places_RK // chunks, tokens)  # a place that is not there is dropped
    cut_RC = masks.cut_RN.reshape(rows, tokens, chunks)[:, :, chunk]
    outside = jnp.broadcast_to(cut_RC[..., None], logits_RCV.shape)
    row_RK = jnp.arange(rows)[:, None]
    outside = outside.at[row_RK, places_RK, masks.tokens_RK].set(False, mode="drop")
    return jnp.where(outside, CUT, logits_RCV)
