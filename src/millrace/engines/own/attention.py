"""Attention over cached keys and values: one kernel for decoding and for prefill.

Prefill attends one query position at a time exactly as decoding does. Its matmuls have the same shapes, and
a batch has more of them. All read the same cached keys through a zero stride. Keys are padded to a multiple
of `BUCKET`; masked keys contribute exact zeros.

With `exact`, keys are padded to a multiple of `BLOCK`, and the weighted sum over values runs block by block,
because matrix kernels split longer sums by their length. Then a position's output depends on its own sequence
only, bit for bit. Prefilling or decoding, the bounds of a prefill and the neighbours do not change the
output.

A layer with a window keeps all keys, and masks those before the window.

Shape suffixes: M rows (tokens), N slots, H query heads, K kv heads, G = H / K, D head_dim, L keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from millrace.engines.own.cache import KVCache

Tensor = torch.Tensor

BLOCK = 64
BUCKET = 32  # of 16, 32 and 64 the fastest


@dataclass(frozen=True, slots=True)
class Kernel:
    """How queries attend to keys: the same in every step of an engine.

    scale, cap  a score is scale q k, or cap * tanh(scale q k / cap)
    windows     of each layer, how many tokens a query sees, its own included; None: all before it
    exact       the sum over values runs in blocks of `BLOCK` keys
    sinks       each query head has one more score, of no key
    """

    scale: float
    cap: float | None
    windows: tuple[int | None, ...]
    exact: bool
    sinks: bool = False

    def __call__(
        self,
        q_BGD: Tensor,
        k_BDL: Tensor,
        v_BLD: Tensor,
        bias_B1L: Tensor,
        out_BGD: Tensor | None = None,
        sinks_BG1: Tensor | None = None,
    ) -> Tensor:
        """softmax(scores + bias) v for B independent queries, written to `out_BGD` if given. A sink takes a
        part of each weight: its own share of the softmax."""
        if self.cap is None:
            scores = torch.baddbmm(bias_B1L, q_BGD, k_BDL, alpha=self.scale)
        else:
            scores = torch.bmm(q_BGD, k_BDL).mul_(self.scale / self.cap).tanh_().mul_(self.cap).add_(bias_B1L)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
        if sinks_BG1 is not None:  # the highest weight is 1 / sum(exp(scores - highest))
            behind = (sinks_BG1 - scores.amax(-1, keepdim=True).float()).exp_()
            weights /= behind.mul_(weights.amax(-1, keepdim=True)).add_(1)
        weights = weights.to(v_BLD.dtype)
        if not self.exact:
            return torch.bmm(weights, v_BLD, out=out_BGD)
        out = torch.bmm(weights[..., :BLOCK], v_BLD[:, :BLOCK], out=out_BGD)
        for start in range(BLOCK, v_BLD.shape[1], BLOCK):
            stop = start + BLOCK
            out.baddbmm_(weights[..., start:stop], v_BLD[:, start:stop])
        return out

    @property
    def plain(self) -> bool:
        """Whether other code may compute the scores and sum in its own order."""
        return self.cap is None and not (self.exact or self.sinks)

    def num_keys(self, length: int) -> int:
        """The padded number of keys for a sequence of `length`."""
        bucket = BLOCK if self.exact else BUCKET
        return -(-length // bucket) * bucket

    def biases(self, positions: Tensor, num_keys: int, dtype: torch.dtype) -> dict[int | None, Tensor]:
        """By window, (positions, 1, L): 0 where a query sees the key, -inf elsewhere. Windows that hold all
        keys share a tensor."""
        behind = positions[:, None, None] - torch.arange(num_keys, device=positions.device)
        zeros = torch.zeros(behind.shape, dtype=dtype, device=positions.device)
        causal = zeros.masked_fill_(behind < 0, float("-inf"))
        narrow = {window for window in self.windows if window is not None and window < num_keys}
        return dict.fromkeys(self.windows, causal) | {
            window: causal.masked_fill(behind >= window, float("-inf")) for window in narrow
        }


class DecodeAttention:
    """One new token in each of the first N slots, at `positions`; `advance` moves every position on by one.

    The constructor computes the indices of keys and values and the mask once, for all layers. `advance` only
    moves them on. A batch can decode `num_steps` tokens; then the longest sequence leaves its bucket.
    """

    def __init__(self, cache: KVCache, positions: Sequence[int], kernel: Kernel) -> None:
        self._count, self._kernel = len(positions), kernel
        device, (kv_heads, head_dim) = cache.values.device, (cache.values.shape[2], cache.values.shape[4])
        self._num_keys = kernel.num_keys(max(positions) + 1)
        self.num_steps = self._num_keys - max(positions)
        positions_N = torch.tensor(positions, device=device)
        rows = torch.arange(self._count * kv_heads, device=device)
        positions_R = positions_N.repeat_interleave(kv_heads)
        features = torch.arange(len(rows) * head_dim, device=device)
        self._value_index = rows * cache.num_positions + positions_R
        self._key_index = features * cache.num_positions + positions_R.repeat_interleave(head_dim)
        self._bias_index = rows * self._num_keys + positions_R
        self._biases = kernel.biases(positions_R, self._num_keys, cache.values.dtype)
        self._layers = [
            (
                keys.view(-1),
                values.view(-1, head_dim),
                keys[: self._count].flatten(0, 1)[..., : self._num_keys],
                values[: self._count].flatten(0, 1)[:, : self._num_keys],
            )
            for keys, values in zip(cache.keys, cache.values, strict=True)
        ]

    def __call__(
        self, layer: int, q_MHD: Tensor, k_MKD: Tensor, v_MKD: Tensor, out_MHD: Tensor, sinks_H: Tensor | None
    ) -> None:
        count, (kv_heads, head_dim) = self._count, k_MKD.shape[1:]
        all_keys, all_values, k_BDL, v_BLD = self._layers[layer]
        all_keys.put_(self._key_index, k_MKD[:count])
        all_values.index_copy_(0, self._value_index, v_MKD[:count].reshape(-1, head_dim))
        q_BGD = q_MHD[:count].reshape(count * kv_heads, -1, head_dim)
        bias = self._biases[self._kernel.windows[layer]]
        sinks = None if sinks_H is None else sinks_H.view(kv_heads, -1, 1).repeat(count, 1, 1)
        self._kernel(q_BGD, k_BDL, v_BLD, bias, out_MHD[:count].view(q_BGD.shape), sinks)

    def advance(self) -> None:
        self.num_steps -= 1
        if self.num_steps:
            self._value_index += 1
            self._key_index += 1
            self._bias_index += 1
            for window, bias in self._biases.items():
                if window is not None:
                    passed = self._bias_index % self._num_keys >= window
                    bias.view(-1).index_fill_(0, self._bias_index - window * passed, float("-inf"))
                bias.view(-1).index_fill_(0, self._bias_index, 0.0)


@dataclass(frozen=True)
class Segment:
    """Positions [start, start + count) of the sequence in `slot`."""

    slot: int
    start: int
    count: int


class PrefillAttention:
    """Consecutive positions of several slots, packed one segment after another."""

    def __init__(self, cache: KVCache, segments: Sequence[Segment], kernel: Kernel) -> None:
        self._cache, self._kernel, self._plan = cache, kernel, []
        device, dtype, row = cache.keys.device, cache.keys.dtype, 0
        for segment in segments:
            stop = segment.start + segment.count
            num_keys = kernel.num_keys(stop)
            biases = kernel.biases(torch.arange(segment.start, stop, device=device), num_keys, dtype)
            self._plan.append((segment, slice(row, row + segment.count), num_keys, biases))
            row += segment.count

    def __call__(
        self, layer: int, q_MHD: Tensor, k_MKD: Tensor, v_MKD: Tensor, out_MHD: Tensor, sinks_H: Tensor | None
    ) -> None:
        kv_heads = k_MKD.shape[1]
        for segment, rows, num_keys, biases in self._plan:
            keys = self._cache.keys[layer, segment.slot]
            values = self._cache.values[layer, segment.slot]
            stop = segment.start + segment.count
            keys[..., segment.start : stop] = k_MKD[rows].permute(1, 2, 0)
            values[:, segment.start : stop] = v_MKD[rows].transpose(0, 1)
            for head, q_MGD in enumerate(q_MHD[rows].chunk(kv_heads, dim=1)):
                group = slice(head * q_MGD.shape[1], (head + 1) * q_MGD.shape[1])
                out_MHD[rows, group] = self._kernel(
                    q_MGD,
                    keys[head, :, :num_keys].expand(segment.count, -1, -1),
                    values[head, :num_keys].expand(segment.count, -1, -1),
                    biases[self._kernel.windows[layer]],
                    sinks_BG1=None if sinks_H is None else sinks_H[None, group, None],
                )
