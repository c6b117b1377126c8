"""Named values inside a model of transformers while it computes one sequence: the reference in float64, and
the trainer in torch.

`checks.numerics` has the names. Shapes: (T, width), T forwarded tokens; log-probs (T,) of the
tokens behind them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.utils import logging

from millrace.core.errors import DataError, boundary
from millrace.devices.device import computing_dtype, torch_device
from millrace.trainer.batch.packing import Branch, Tree, pack
from millrace.trainer.kernels.on_gpu import take_apart
from millrace.trainer.model import load_model, row_logprobs, served_weights

Values = dict[str, NDArray[np.floating[Any]]]
Note = Callable[[str, torch.Tensor], None]
OUTPUTS = {
    "input_layernorm": "input_norm",
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "self_attn.o_proj": "o",
    "post_self_attn_layernorm": "o_norm",
    "mlp": "down",
    "post_mlp_layernorm": "down_norm",
    "post_feedforward_layernorm": "down_norm",
    "": "output",
}
"""Modules of a layer, and what their outputs are called."""
INPUTS = {"self_attn.o_proj": "attention", "mlp.down_proj": "gated"}


def reference_values(
    path: Path, tokens: Sequence[int], *, published: str, temperature: float
) -> tuple[Values, str]:
    """What transformers computes in float64, on the CPU, with the weights rounded to `published`. Its norms,
    its softmax and its rotary angles are in float32 all the same.

    Raises: DataError: transformers cannot load the model."""
    logging.disable_progress_bar()
    with boundary("the reference", f"`model.path`: load the model in {path}", DataError):
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", use_safetensors=True
        ).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, published)).double()
    model.double()
    values: Values = {}
    with _watched(model, partial(_note, values, len(tokens) - 1)), torch.no_grad():
        logits = model(torch.tensor([tokens[:-1]]), use_cache=False).logits[0]
    targets = torch.tensor(tokens[1:])[:, None]
    logprobs = torch.log_softmax(logits / temperature, dim=-1).gather(1, targets)[:, 0]
    return values | {"logits": logits.numpy(), "logprobs": logprobs.numpy()}, "float64"


def trainer_values(
    path: Path, tokens: Sequence[int], *, published: str, temperature: float, device: str
) -> tuple[Values, str]:
    """What the trainer in torch computes in one process, and the format of its matrix products."""
    place = torch_device(device)
    model, dtype = load_model(path, place), getattr(torch, published)
    take_apart(model)
    computing = computing_dtype(dtype, place)
    tree = Tree(tokens[:1], [Branch(tokens[1:], np.ones(len(tokens) - 1, np.bool_), 0)])
    (row,) = pack([tree], len(tokens))
    values: Values = {}
    with (
        torch.no_grad(),
        served_weights(model, published=dtype, computing=computing),
        _watched(model, partial(_note, values, len(tokens) - 1)),
    ):
        logprobs, *_ = row_logprobs(model, row, temperature=temperature, dtype=computing)
    values["logprobs"] = logprobs.cpu().numpy()[np.argsort(row.flat_N)]
    return values, str(computing).removeprefix("torch.")


def _note(values: Values, count: int, name: str, x: torch.Tensor) -> None:
    """The first `count` tokens of (1, T, width), (1, T, heads, D) or (1, heads, T, D); others are padding."""
    x = x.transpose(1, 2) if x.ndim == 4 and x.shape[1] < count <= x.shape[2] else x
    values[name] = x[0, :count].flatten(1).double().cpu().numpy()


@contextlib.contextmanager
def _watched(model: Any, note: Note) -> Iterator[None]:
    """Inside the block `note` gets every named value, in the order in which they are computed."""
    with contextlib.ExitStack() as stack:

        def output(module: Any, name: str) -> None:
            def hook(module: Any, args: Any, out: Any) -> None:
                note(name, out[0] if isinstance(out, tuple) else out)

            stack.callback(module.register_forward_hook(hook).remove)

        def arrival(module: Any, name: str) -> None:
            hook = module.register_forward_pre_hook(lambda module, args: note(name, args[0]))
            stack.callback(hook.remove)

        arrival(model.base_model.layers[0], "embedding")
        output(model.base_model.norm, "norm")
        for index, layer in enumerate(model.base_model.layers):
            modules, of_layer = dict(layer.named_modules()), f"layers.{index}."
            second = "pre_feedforward_layernorm"
            if second in modules:  # of Gemma
                output(modules["post_attention_layernorm"], of_layer + "o_norm")
            else:
                second = "post_attention_layernorm"
            for names, hooked in (
                (INPUTS | {second: "residual"}, arrival),
                (OUTPUTS | {second: "mlp_norm"}, output),
            ):
                for module, name in names.items():
                    if module in modules:
                        hooked(modules[module], of_layer + name)
        stack.enter_context(_watched_attention(model, note))
        yield


@contextlib.contextmanager
def _watched_attention(model: Any, note: Note) -> Iterator[None]:
    """`note` gets queries and keys as attention does, with their rotary embedding."""
    name, family = model.config._attn_implementation, sys.modules[type(model).__module__]
    eager = vars(family), "eager_attention_forward"
    functions, key = eager if name == "eager" else (AttentionInterface._global_mapping, name)
    inner = functions[key]

    def attention(module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **options: Any) -> Any:
        note(f"layers.{module.layer_idx}.q_rope", query)
        note(f"layers.{module.layer_idx}.k_rope", key)
        return inner(module, query, key, *args, **options)

    functions[key] = attention
    try:
        yield
    finally:
        functions[key] = inner
