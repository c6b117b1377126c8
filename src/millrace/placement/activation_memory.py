"""Activation memory: memory that workers need for a moment, for activations and logits. An upper estimate.

    trainer   a micro-batch. For the gradient, each token and layer takes 28 H + size (4 I + 5 (Q + K)) bytes;
              with `model.recompute` 4 H of each layer, and all of one layer. Norms after attention and MLP
              add 25 H, and E experts a token 12 E H. If scores are capped, each query head adds 10 bytes for
              every token that it may see. Then `CHUNKS` chunks of logits, and two copies of the output
              projection in float32. `trainer.sequence` divides tokens, `trainer.tensor` I, Q, K and the
              projection. Matmuls in bfloat16 keep a copy of a layer's matrices. If weights are divided or
              offloaded, the trainer gathers in float32 the weights outside layers, and `GATHERED` layers. If
              an update takes more, its memory counts: with 8-bit moments on a CPU, `UPDATE_BYTES` for each
              number of the largest tensor
    replica   the larger of a decode step's sampling and a prefill chunk (rows, and the scores of one KV head
              with all keys). Sampling takes 20 bytes a slot and token of the vocabulary, 48 if min-p, top-k
              or top-p cut it, and 6 more if penalties or banned tokens edit it

H hidden, I intermediate, Q and K the widths of all query and all key heads; `size` bytes of the computing
format. A token's bytes are within 20 % of the bytes that torch saves; with caps they are for long sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.config.schema import Config
from millrace.core.types import Sampling

CHUNK_BYTES, GPU_CHUNK_BYTES = 64 << 20, 512 << 20
"""Bytes of float32 logits that the trainer computes at once (`trainer.logprobs`). On a GPU, a chunk of few
tokens would cost more for the gradient of the whole projection than for its own logits."""
CHUNKS = 3
SAMPLING_BYTES, CUT_BYTES, EDIT_BYTES = 20, 48, 6
SCORE_BYTES = 12
UPDATE_BYTES = 56
"""torchao's update of 8-bit moments, not compiled."""
GATHERED = 2
"""Gathered layers: the computing layer, and the next layer or a gradient."""


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes. `micro_batch_tokens` is a rank's share of the largest micro-batch; each of its tokens takes
    `token_bytes`. `weights_bytes`: weights that are gathered or rounded during the computation."""

    micro_batch_tokens: int = 0
    token_bytes: int = 0
    logits_bytes: int = 0
    replica_bytes: int = 0
    weights_bytes: int = 0
    update_bytes: int = 0

    @property
    def trainer_bytes(self) -> int:
        gradient = self.micro_batch_tokens * self.token_bytes + self.logits_bytes + self.weights_bytes
        return max(gradient, self.update_bytes)

    def tokens_that_fit(self, room: float) -> int:
        """The largest micro-batch for which `room` bytes are enough."""
        return max(0, int((room - self.logits_bytes - self.weights_bytes) // max(1, self.token_bytes)))


@dataclass(frozen=True)
class Shape:
    """The dimensions of a model, and numbers of weights: of the largest layer, outside layers, of the largest
    tensor. `routed`: experts of a token."""

    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    query_heads: int
    kv_heads: int
    head_dim: int
    layer_weights: int = 0
    other_weights: int = 0
    largest_weight: int = 0
    routed: int = 0
    norms_after: bool = False
    capped: bool = False


def estimate(config: Config, shape: Shape, size: int, *, on_gpu: bool = False) -> ActivationMemory:
    """The activation memory of a run. `size`: bytes of a number in the computing format."""
    longest = config.rollout.max_sequence_tokens
    tokens = min(config.trajectories_per_step * longest, max(config.batch.token_budget, longest))
    tensor_ranks = config.trainer.tensor
    eager = config.optimizer.states == "8bit" and not on_gpu
    return ActivationMemory(
        micro_batch_tokens=-(-tokens // config.trainer.sequence),
        token_bytes=_token_bytes(shape, size, tensor_ranks, longest, recompute=config.model.recompute),
        logits_bytes=CHUNKS * max(GPU_CHUNK_BYTES if on_gpu else CHUNK_BYTES, 4 * shape.vocabulary)
        + 8 * shape.vocabulary * shape.hidden // tensor_ranks,
        replica_bytes=_replica_bytes(config, shape, size),
        weights_bytes=_weights_bytes(config, shape, size) // tensor_ranks,
        update_bytes=UPDATE_BYTES * shape.largest_weight // config.trainer.ranks if eager else 0,
    )


def _weights_bytes(config: Config, shape: Shape, size: int) -> int:
    layers = 1 if config.model.recompute else shape.layers
    rounded = size * layers * shape.layer_weights if size < 4 else 0
    trainer = config.trainer
    if trainer.shard * trainer.sequence == 1 and not trainer.offload:
        return rounded
    return rounded + 4 * (GATHERED * shape.layer_weights + shape.other_weights)


def _token_bytes(shape: Shape, size: int, tensor_ranks: int, longest: int, *, recompute: bool) -> int:
    heads = (shape.query_heads + shape.kv_heads) * shape.head_dim
    layer = (28 + 25 * shape.norms_after + 12 * shape.routed) * shape.hidden
    layer += (
        size * (4 * shape.intermediate + 5 * heads) + shape.capped * 10 * shape.query_heads * longest
    ) // tensor_ranks
    return 4 * shape.hidden * shape.layers + layer if recompute else shape.layers * layer


def _replica_bytes(config: Config, shape: Shape, size: int) -> int:
    if config.rollout.servers:
        return 0
    return max(_sampling_bytes(config, shape), _prefill_bytes(config, shape, size))


def _sampling_bytes(config: Config, shape: Shape) -> int:
    sampling = Sampling(**dict(config.sampling))
    each = CUT_BYTES if sampling.cuts else SAMPLING_BYTES
    return config.rollout.slots * shape.vocabulary * (each + (EDIT_BYTES if sampling.edits else 0))


def _prefill_bytes(config: Config, shape: Shape, size: int) -> int:
    longest = config.rollout.max_sequence_tokens
    rows = min(config.rollout.prefill_chunk, config.rollout.slots * longest)
    heads = (shape.query_heads + 2 * shape.kv_heads) * shape.head_dim
    row = size * (4 * shape.hidden + 3 * shape.intermediate + 3 * heads)
    scores = min(rows, longest) * longest * (shape.query_heads // shape.kv_heads) * SCORE_BYTES
    return rows * row + scores
