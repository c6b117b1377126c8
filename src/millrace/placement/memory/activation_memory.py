"""Activation memory: memory that workers need for a moment, for activations and logits. An upper estimate.

    trainer   the larger of two phases of a micro-batch. In both, each layer keeps for the gradient 4 H a
              token with `model.recompute`, else all of it: 28 H + size (4 I + 5 (Q + K)). Norms after
              attention and MLP add 25 H, and E experts a token 12 E H. With caps of scores or sinks, each
              query head adds 10 bytes for every token that it may see. Clamped gates keep 22 I, not 4 I size.
              A trainer alone on a CPU keeps 2 I size of a dense MLP (3 with an adapter), 12 H where no norm
              is after a layer, and 16 (Q + K) in float32. A smaller one (`SPARING_MIN`) keeps 4 I size, and
              20 H in float32.
              Head: 12 H a token, `CHUNKS` chunks of logits, and copies and gradients of the projection.
              Layer: all of one layer again with `model.recompute`; 16 H + 2 size I a token of gradients;
              copies and gradients of the layer's weights. With `trainer.quantization` also 10 I a token, and
              14 H I in all: numbers in float32 that become fp8.
              `trainer.sequence` divides tokens, `trainer.tensor` I, Q, K and weights. Ranks that gather
              weights have gathered copies, too. If an update takes more, its memory counts: with 8-bit
              moments on a CPU, `UPDATE_BYTES` for each number of the largest tensor
    replica   the larger of a decode step's sampling and a prefill chunk (rows, and the scores of one KV head
              with all keys). Sampling takes 20 bytes a slot and token of the vocabulary, 48 if min-p, top-k
              or top-p cut it, and 6 more if penalties or banned tokens edit it

H hidden, I intermediate, Q and K the widths of all query and all key heads; `size` bytes of the computing
format. The peak is at most 15 % above that of fake tensors (`tests/unit/test_placement_fake.py`). With caps
or sinks a token's bytes are those of long sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from millrace.config.schema import Config
from millrace.core.types import Sampling
from millrace.placement.memory.model_shape import Shape

CHUNK_BYTES, GPU_CHUNK_BYTES = 32 << 20, 512 << 20
"""Bytes of float32 logits that the trainer computes at once (`trainer.row_logprobs`). On a GPU, few tokens
would cost more for the gradient of the whole projection than for its own logits."""
CHUNKS = 3
SAMPLING_BYTES, CUT_BYTES, EDIT_BYTES = 20, 48, 6
SCORE_BYTES = 12
SPARING_MIN = 10**7
"""Parameters from which the layers of a trainer on a CPU keep less for the gradient, and compute it again.
Activations of a smaller model are small, and its step would take a tenth longer."""
UPDATE_BYTES = 56
"""torchao's update of 8-bit moments, not compiled."""


def spares(parameters: int) -> bool:
    """Whether a trainer on a CPU spares memory for activations and gradients of a model of this size."""
    return parameters >= SPARING_MIN


@dataclass(frozen=True)
class Phase:
    """Bytes of a moment of a step: for each token of the micro-batch, and beside these."""

    token_bytes: int = 0
    fixed_bytes: int = 0

    def total(self, tokens: int) -> int:
        return tokens * self.token_bytes + self.fixed_bytes

    def tokens_that_fit(self, room: float) -> int:
        return max(0, int((room - self.fixed_bytes) // max(1, self.token_bytes)))


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes. `micro_batch_tokens` is a rank's share of the largest micro-batch. The trainer needs the most at
    the output projection (`head`) or in the backward pass of a layer."""

    micro_batch_tokens: int = 0
    head: Phase = Phase()
    layer: Phase = Phase()
    replica_bytes: int = 0
    update_bytes: int = 0

    @property
    def trainer_bytes(self) -> int:
        tokens = self.micro_batch_tokens
        return max(self.head.total(tokens), self.layer.total(tokens), self.update_bytes)

    def of_at_most(self, tokens: int) -> ActivationMemory:
        """If no more tokens than these are computed at once."""
        return replace(self, micro_batch_tokens=min(self.micro_batch_tokens, tokens))

    def tokens_that_fit(self, room: float) -> int:
        """The largest micro-batch for which `room` bytes are enough."""
        return min(self.head.tokens_that_fit(room), self.layer.tokens_that_fit(room))


def estimate(config: Config, shape: Shape, size: int, *, on_gpu: bool = False) -> ActivationMemory:
    """The activation memory of a run. `size`: bytes of a number in the computing format."""
    longest = config.rollout.max_sequence_tokens
    tokens = min(config.trajectories_per_step * longest, max(config.batch.token_budget, longest))
    eager = config.optimizer.states == "8bit" and not on_gpu
    return ActivationMemory(
        micro_batch_tokens=-(-tokens // config.trainer.sequence),
        head=_head(config, shape, size, on_gpu=on_gpu),
        layer=_layer(config, shape, size, on_gpu=on_gpu),
        replica_bytes=_replica_bytes(config, shape, size),
        update_bytes=UPDATE_BYTES * shape.largest_weight // config.trainer.ranks if eager else 0,
    )


def _head(config: Config, shape: Shape, size: int, *, on_gpu: bool) -> Phase:
    """A copy in the computing format, the gradient in float32, and a matmul's result: 8 bytes a weight. In
    bfloat16 a GPU adds the result by rows, and a gathered gradient is rounded instead. Ranks on a CPU have a
    second copy, rounded and in float32, for the logits. A trainer alone has none: it adds to the sum of the
    gradients, on a GPU by rows. In float32 the gathered weight is no copy that the phase would make
    anyway."""
    gathered_rounded = _gathers(config) and bool(shape.head_weights) and size < 4
    each = 8 + (4 if _gathers(config) and not gathered_rounded else 0)
    if size < 4 and on_gpu:
        each = 2 if _rounds_once(config) else each - 2 * (not gathered_rounded)
    elif not on_gpu:
        each = 0 if config.trainer.ranks == 1 else each + 4 * (size < 4)
    chunks = CHUNKS * max(GPU_CHUNK_BYTES if on_gpu else CHUNK_BYTES, 4 * shape.vocabulary)
    projection = each * shape.projection // config.trainer.tensor
    token = _kept_token_bytes(config, shape, size, on_gpu=on_gpu) + 12 * shape.hidden
    return Phase(token, _rounded_bytes(config, shape, size, on_gpu=on_gpu) + chunks + projection)


def _layer(config: Config, shape: Shape, size: int, *, on_gpu: bool) -> Phase:
    """Weights that gather: the layer's, the next layer's, and gradients in two formats. A tied projection
    stays gathered, with its gradient."""
    weights, matrix = shape.layer_weights, shape.hidden * shape.intermediate
    quantised = config.trainer.quantization is not None
    copies = (size if size < 4 and config.model.recompute else 0) * weights
    copies += (14 if quantised else 6) * matrix
    if _gathers(config):
        gathered = 4 if config.adapter.rank is not None else size
        copies = (3 * gathered + 4) * weights
        copies += 0 if shape.head_weights else 8 * shape.vocabulary * shape.hidden
    tensor = config.trainer.tensor
    token = (
        _kept_token_bytes(config, shape, size, on_gpu=on_gpu)
        + 16 * shape.hidden
        + (10 * quantised + 2 * size) * shape.intermediate // tensor
    )
    if config.model.recompute:
        token += _layer_token_bytes(config, shape, size, on_gpu=on_gpu)
    return Phase(token, _rounded_bytes(config, shape, size, on_gpu=on_gpu) + copies // tensor)


def _gathers(config: Config) -> bool:
    return config.trainer.shard * config.trainer.sequence > 1 or config.trainer.offload


def _rounds_once(config: Config) -> bool:
    return config.trainer.ranks == 1 and not config.trainer.offload


def _rounded_bytes(config: Config, shape: Shape, size: int, *, on_gpu: bool) -> int:
    """Copies of all layers in the computing format, which autocast keeps for the gradient. Ranks gather such
    copies. A trainer alone has one of each matrix, of the output projection too, for all rows
    (`trainer.kernels.products`), or two in fp8."""
    layers = shape.layers * shape.layer_weights
    if config.trainer.quantization is not None:
        return 2 * layers + (size * shape.projection if size < 4 else 0)
    if size < 4 and (_rounds_once(config) if on_gpu else config.trainer.ranks == 1):
        layers = 0 if config.adapter.rank is not None and (config.model.recompute or not on_gpu) else layers
        return size * (layers + shape.projection)
    if size == 4 or config.model.recompute or _gathers(config):
        return 0
    return size * layers // config.trainer.tensor


def _kept_token_bytes(config: Config, shape: Shape, size: int, *, on_gpu: bool) -> int:
    """For the gradient, in all layers."""
    each = (
        4 * shape.hidden if config.model.recompute else _layer_token_bytes(config, shape, size, on_gpu=on_gpu)
    )
    return shape.layers * each


def _layer_token_bytes(config: Config, shape: Shape, size: int, *, on_gpu: bool) -> int:
    alone = not on_gpu and config.trainer.ranks == 1
    heads = (shape.query_heads + shape.kv_heads) * shape.head_dim
    divided = (22 if shape.clamped else 4 * size) * shape.intermediate + 5 * size * heads
    divided += shape.composed * 10 * shape.query_heads * config.rollout.max_sequence_tokens
    whole = (28 + 25 * shape.norms_after + 12 * shape.routed) * shape.hidden
    if alone:  # `trainer.kernels.on_cpu` keeps less than autograd
        sparing = spares(shape.parameters)
        spared = 1 if config.adapter.rank is not None else 2  # an adapter keeps the product of the gate
        divided -= spared * size * shape.intermediate if sparing and not shape.routed else 0
        divided -= size * heads if size == 4 else 0
        normed = (12 if shape.routed else 16) - (0 if sparing or size < 4 else 8)
        whole -= 0 if shape.norms_after else normed * shape.hidden
    return whole + divided // config.trainer.tensor


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
