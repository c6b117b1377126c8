"""Named values inside the torch engine while it computes one sequence as a prompt.

The engine runs as it runs in a replica, attention in C or on a GPU included. Only the kernels of `fused` do
not run, because values inside them cannot be seen. What the engine calls is exchanged from outside, on this
one engine. Norms and products are called with weights, and these say where.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from millrace.core.types import Sampling, Work
from millrace.devices.device import computing_dtype
from millrace.engines.own.load_engine import load_engine
from millrace.engines.own.parameters import Parameters
from millrace.engines.own.torch_engine import TorchEngine

Tensor = torch.Tensor
Values = dict[str, NDArray[np.floating[Any]]]


def engine_values(
    path: Path, tokens: Sequence[int], *, published: str, temperature: float, device: str, exact: bool
) -> tuple[Values, str]:
    """Values of the tokens but the last, (T, width) each, log-probs (T,) of the tokens behind them, and the
    format that the engine computes in."""
    count = len(tokens) - 1
    options = {"slots": 1, "max_sequence_tokens": count + 2, "prefill_chunk": count, "exact": exact}
    engine = load_engine(str(path), dtype=published, device=device, **options)
    watched = _Watched(engine, count)
    whole = array("i", tokens)
    sampling = Sampling(max_tokens=1)
    engine.submit([Work(0, group_id=0, lease=0, prompt=whole, tokens=array("i"), sampling=sampling, seed=0)])
    engine.step()
    logits = torch.from_numpy(watched.values["logits"])
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    computing = computing_dtype(getattr(torch, published), engine._device)
    return watched.values | {"logprobs": chosen.numpy()}, str(computing).removeprefix("torch.")


class _Watched:
    """`values`: what `engine` computes in its first forward pass. The engine is changed for good."""

    def __init__(self, engine: TorchEngine, count: int) -> None:
        self.values: Values = {}
        self._count, self._forward, self._hidden = count, engine._forward, engine._hidden
        shape = self._forward._architecture
        self._sizes = [heads * shape.head_dim for heads in (shape.num_heads, *[shape.num_kv_heads] * 2)]
        self._before, self._after = _places(engine._active)
        self._qkv = torch.empty(0)  # of the layer under way
        vars(engine)["_hidden"] = self.hidden
        of_forward: dict[str, Any] = vars(self._forward)
        of_forward["_norm"] = _Seen(self._forward._norm, self._called)
        of_forward["fuses"] = False
        of_forward["matmul"] = _Seen(self._forward.matmul, self._called)
        of_forward["_add_linear"] = partial(self._added, self._forward._add_linear)
        if (native := engine._native) is not None:
            of_native: dict[str, Any] = vars(native)
            of_native["_norm"] = partial(self._normed_into, native._norm)
            of_native["_multiply"] = partial(self._called, native._multiply)
            of_native["_add"] = partial(self._added_in_c, native._add)

    def hidden(self, weights: Any, tokens_M: Tensor, positions_M: Tensor, attention: Any) -> Tensor:
        if callable(attention):
            attention = partial(self._attended, attention)
        hidden = self._hidden(weights, tokens_M, positions_M, attention)
        self._note("norm", hidden)
        if "logits" not in self.values:
            self._note("logits", self._forward.logits(weights, hidden, self._count))
        return hidden

    def _note(self, name: str | None, x: Tensor) -> None:
        if name is not None and name not in self.values:  # later passes are of the token that is sampled
            self.values[name] = x[: self._count].flatten(1).double().cpu().numpy()

    def _called(self, function: Any, x: Tensor, weight: Tensor | None = None, *args: Any) -> Tensor:
        """A norm or a product."""
        self._note(self._before.get(id(weight)), x)
        out: Tensor = function(x, weight, *args)
        self._computed(weight, out)
        return out

    def _computed(self, weight: Tensor | None, out: Tensor) -> None:
        name = self._after.get(id(weight))
        if name is not None and name.endswith("qkv"):
            self._qkv = out
            for letter, part in zip("qkv", out.split(self._sizes, dim=1), strict=True):
                self._note(name.removesuffix("qkv") + letter, part)
        else:
            self._note(name, out)

    def _normed_into(self, function: Any, x: Tensor, weight: Tensor, out: Tensor) -> None:
        self._note(self._before.get(id(weight)), x)
        function(x, weight, out)
        self._computed(weight, out)

    def _added(self, function: Any, to: Tensor, x: Tensor, weight: Tensor, *args: Any) -> Any:
        self._note(self._before.get(id(weight)), x)
        return function(to, x, weight, *args)

    def _added_in_c(self, function: Any, to: Tensor, x: Tensor, weight: Tensor, *args: Any) -> None:
        name = self._before[id(weight)]
        if name.endswith("attention"):  # the C code has turned queries and keys where they are
            for letter, part in zip("qk", self._qkv.split(self._sizes, dim=1), strict=False):
                self._note(f"{name.removesuffix('attention')}{letter}_rope", part)
        self._added(function, to, x, weight, *args)

    def _attended(self, function: Any, layer: int, q: Tensor, k: Tensor, *args: Any) -> None:
        self._note(f"layers.{layer}.q_rope", q)
        self._note(f"layers.{layer}.k_rope", k)
        function(layer, q, k, *args)


class _Seen:
    """A norm, or the products of a forward pass, whose calls are passed through `seen`."""

    def __init__(self, inner: Any, seen: Any) -> None:
        self._inner, self._seen = inner, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *args: Any) -> Tensor:
        out: Tensor = self._seen(self._inner, *args)
        return out

    def linear(self, *args: Any) -> Tensor:
        out: Tensor = self._seen(self._inner.linear, *args)
        return out


def _places(weights: Parameters) -> tuple[dict[int, str], dict[int, str]]:
    """By the identity of a tensor, the names of what goes into its norm or product, and of what comes out."""
    before, after, stream = {}, {}, "embedding"
    for index, layer in enumerate(weights.layers):
        of_layer = f"layers.{index}."
        before[id(layer.input_norm)] = stream
        before[id(layer.out)], before[id(layer.down)] = of_layer + "attention", of_layer + "gated"
        before[id(layer.mlp_norm)], stream = of_layer + "residual", of_layer + "output"
        for tensor, name in (
            (layer.input_norm, "input_norm"),
            (layer.qkv, "qkv"),
            (layer.out_norm, "o_norm"),
            (layer.mlp_norm, "mlp_norm"),
            (layer.down_norm, "down_norm"),
        ):
            if tensor is not None:
                after[id(tensor)] = of_layer + name
    before[id(weights.norm)] = stream
    return before, after
