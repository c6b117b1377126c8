"""Whether this machine can compute a trajectory's numbers independently, bit for bit, of its neighbours.

The test runs the architecture of the run. Its forward pass runs with random weights over every number of rows
that will occur, on rows in random places. The first candidate in which no row's result depends on other rows
is taken. Attention is tested likewise, for every number of keys.

Two conditions are arranged, not tested. Everything runs on one thread, because threads split a range of
numbers and round at the split. And the sum over values runs in blocks of one bucket of keys, because some
kernels split longer sums at a fraction of their length. Such a kernel would round a sequence by its
neighbours' length.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch

from millrace.core.errors import ConfigError
from millrace.devices.threads import on_threads
from millrace.engines.own.accelerated.row_matmul import RowMatmul
from millrace.engines.own.attention import BLOCK, Kernel
from millrace.engines.own.cache import KVCache
from millrace.engines.own.forward import ForwardPass
from millrace.engines.own.parameters import Parameters

Tensor = torch.Tensor

# At least so many rows are tried, whatever the engine's settings. So engines with other settings take the
# same candidate, and a trajectory comes out the same in each engine.
ROWS_MIN, LOGITS_MIN = 512, 128
CANDIDATES = (*(RowMatmul(tile) for tile in (8, 16, 32, 64, 96, 192)), RowMatmul(8, alone=True))


@torch.inference_mode()
def exact_matmul(forward: ForwardPass, weights: Parameters, slots: int, rows: int) -> RowMatmul:
    """The first of `CANDIDATES` with which rows are independent: at least `rows` of hidden states and
    `slots` of logits.

    `weights` are filled with random numbers: give a set that is not served.
    Raises: ConfigError: no candidate passes, or the device is not a CPU.
    """
    if weights.embedding.device.type != "cpu":
        raise _refusal(f"it is known of CPUs only, and the engine runs on {weights.embedding.device}")
    generator = torch.Generator().manual_seed(0)
    for tensor in weights.named.values():
        tensor.normal_(generator=generator)
    few_layers = copy.copy(weights)  # every other layer has the shapes of one of these
    few_layers.layers = list({layer.router is None: layer for layer in weights.layers}.values())

    def hidden(matmul: RowMatmul, tokens: Tensor, positions: Tensor) -> Tensor:
        forward.matmul = matmul
        return forward.hidden(few_layers, tokens, positions, _query_as_output)

    def logits(matmul: RowMatmul, tokens: Tensor, positions: Tensor) -> Tensor:
        return forward.logits(few_layers, hidden(matmul, tokens, positions), len(tokens))

    def expert(matmul: RowMatmul, tokens: Tensor, positions: Tensor) -> Tensor:
        """All rows may go to one expert."""
        return forward.mixture.expert(matmul, routed[0], 0, weights.embedding[tokens])

    routed = [layer for layer in few_layers.layers if layer.router is not None]
    many = max(rows, ROWS_MIN)
    tried = [(logits, max(slots, LOGITS_MIN)), (hidden, many), *([(expert, many)] if routed else [])]
    vocab = len(weights.embedding)
    with on_threads(1):
        for matmul in CANDIDATES:
            if all(
                _rows_are_independent(partial(compute, matmul), matmul, vocab, limit, generator)
                for compute, limit in tried
            ):
                return matmul
    raise _refusal("a row's result changes with the number of rows, however they are padded")


def _query_as_output(
    layer: int, q_MHD: Tensor, k_MKD: Tensor, v_MKD: Tensor, out_MHD: Tensor, sinks_H: Tensor | None
) -> None:
    """In place of attention: an output that depends on each row alone."""
    out_MHD.copy_(q_MHD)


def _rows_are_independent(
    compute: Callable[[Tensor, Tensor], Tensor],
    matmul: RowMatmul,
    vocab: int,
    limit: int,
    generator: torch.Generator,
) -> bool:
    """Whether a row comes out the same in every number of rows and at every place among them."""
    counts = sorted({matmul.rows(count) for count in range(1, limit + 1)})
    tokens = torch.randint(vocab, (counts[-1],), generator=generator)
    positions = torch.randint(BLOCK, (counts[-1],), generator=generator)
    expected = compute(tokens, positions)
    for count in counts:
        rows = torch.randperm(counts[-1], generator=generator)[:count]
        if not torch.equal(compute(tokens[rows], positions[rows]), expected[rows]):
            return False
    return True


@torch.inference_mode()
def check_attention(cache: KVCache, kernel: Kernel, *, group: int) -> None:
    """Check attention over each number of keys that the cache can hold, for `group` query heads of one key
    head.

    Raises: ConfigError: a query's result depends on the number of other queries, on whether they read the
    same keys, or on how many keys are masked.
    """
    kv_heads, head_dim, num_keys = cache.keys.shape[2:]
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(cache.keys.dtype)

    q, k, v = random(3, group, head_dim), random(3, head_dim, num_keys), random(3, num_keys, head_dim)
    with on_threads(1):
        for length in range(BLOCK, num_keys + 1, BLOCK):
            most = cache.num_slots * kv_heads if length == BLOCK else 8
            if not _queries_are_independent(partial(_attended, kernel), q, k, v, length, most):
                raise _refusal(f"attention over {length} keys changes with what is computed beside it")


def _queries_are_independent(
    attended: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, length: int, most: int
) -> bool:
    """Whether three queries with keys of their own have the same results in four settings: alone; among
    `most` queries; reading one set of keys, as in prefill; and with a bucket of masked keys behind
    `length`."""
    alone = torch.cat([attended(q[i : i + 1], k[i : i + 1], v[i : i + 1], length) for i in range(3)])
    turns = torch.arange(most) % 3
    among = attended(q[turns], k[turns], v[turns], length)
    shared = torch.cat([
        attended(q[i].expand(4, -1, -1), k[i].expand(4, -1, -1), v[i].expand(4, -1, -1), length)[:1]
        for i in range(3)
    ])  # fmt: skip
    padded = attended(q, k, v, length, masked=min(BLOCK, k.shape[2] - length))
    return torch.equal(among, alone[turns]) and torch.equal(shared, alone) and torch.equal(padded, alone)


def _attended(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, length: int, masked: int = 0) -> Tensor:
    over = length + masked
    bias = torch.zeros((len(q), 1, over), dtype=q.dtype)
    bias[..., length:] = float("-inf")
    sinks = torch.linspace(-1.0, 1.0, q.shape[1])[None, :, None] if kernel.sinks else None
    return kernel(q, k[..., :over], v[:, :over], bias, None, sinks)


def _refusal(reason: str) -> ConfigError:
    return ConfigError(
        f"`rollout.exact` cannot be had here: {reason}.\n"
        '  Set it to false, or run on a CPU (`model.device` = "cpu") of another kind'
    )
