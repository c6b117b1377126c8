"""Proof that an engine computes with the weights that were published.

An engine that fuses, shards and packs its tensors has no tensor whose digest could be compared. So the proof
compares log-probs of fixed tokens with those of the plain Hugging Face model. The plain model computes with
the bytes that the digest is of. The plain model has no weights of its own: it reads the relay's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from millrace.core.digest import NamedBuffer
from millrace.engines.vllm.loading import as_tensor

TOKENS = 32

# Bounds of the mean distance of a log-prob, times the log-probs' spread if the spread is above 1: rounding
# grows with the spread. In bfloat16 rounding took up to 0.05 of the spread.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
# With fp8 it took up to 0.17: a number near the middle of two steps is rounded to either of them.
TOLERANCE_QUANTISED = 0.3


class Proof:
    """The proof for the model in `model_path`. The log-probs of `tokens` are compared. `quantised`: the
    engine rounds the weights that it is given, and so does the plain model."""

    def __init__(
        self, model_path: str, dtype: torch.dtype, *, tokens_max: int, quantised: bool = False
    ) -> None:
        logging.disable_progress_bar()
        config = AutoConfig.from_pretrained(model_path)
        self._model = _without_weights(config, dtype)
        self._tolerance = TOLERANCE[dtype]
        if quantised:
            self._tolerance = TOLERANCE_QUANTISED
            quantise(self._model)
        count, generator = min(TOKENS, tokens_max), torch.Generator().manual_seed(0)
        self.tokens: list[int] = torch.randint(config.vocab_size, (count,), generator=generator).tolist()

    def expected(self, buffers: Sequence[NamedBuffer]) -> torch.Tensor:
        """Log-probs of all tokens but the first, (TOKENS - 1,), under the version in `buffers`."""
        return self.logprobs({buffer.name: as_tensor(buffer) for buffer in buffers})

    @torch.inference_mode()
    def logprobs(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Those log-probs of the plain model with `weights`."""
        tokens = torch.tensor(self.tokens)
        arguments = (tokens[None],), {"use_cache": False}
        logits = torch.func.functional_call(self._model, dict(weights), *arguments, strict=False).logits[0]
        logprobs = logits.float().log_softmax(dim=-1)
        return logprobs[:-1].gather(1, tokens[1:, None])[:, 0]

    def distance(self, expected: torch.Tensor, logprobs: Sequence[float]) -> float:
        """Mean distance of `logprobs` from `expected`, in units of the largest distance that rounding
        explains. Above 1 the engine has other weights. Only finite log-probs in `expected` count. 0 if there
        are none: the next step reports that."""
        finite = expected.isfinite()
        if not finite.any():
            return 0.0
        expected, answered = expected[finite], torch.tensor(logprobs)[finite]
        mean = (expected - answered).abs().mean().nan_to_num(torch.inf)
        return float(mean) / (self._tolerance * max(1.0, float(expected.std(correction=0))))


def _without_weights(config: object, dtype: torch.dtype) -> torch.nn.Module:
    """The model with its buffers. All parameters are views of one number, expanded to their shapes."""
    with torch.device("meta"):
        shaped = AutoModelForCausalLM.from_config(config)
    zero = torch.zeros((), dtype=dtype)
    state = {name: zero.expand(parameter.shape) for name, parameter in shaped.named_parameters()}
    model: torch.nn.Module = type(shaped).from_pretrained(None, config=config, state_dict=state, dtype=dtype)
    return model.eval()


FP8_MAX = 448.0
_SCALE_MIN = 1 / (FP8_MAX * 512)  # vLLM's
_ROWS = 128  # are rounded at a time, and stay in the cache of a CPU


def quantise(model: torch.nn.Module) -> None:
    """From now on each pass of `model` rounds the matrices of its layers, and their inputs. Weights stay."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            module.forward = partial(_rounded_linear, module)  # type: ignore[method-assign]


def _quantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of fp8 in the format of `rows`, and the scale of each row in float32.

    Shapes: rows (..., columns) -> (..., columns), (..., 1)"""
    wide = rows.float()
    scale = (wide.abs().amax(-1, keepdim=True) / FP8_MAX).clamp_min(_SCALE_MIN)
    return (wide / scale).to(torch.float8_e4m3fn).to(rows.dtype), scale


def _rounded_linear(layer: torch.nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    numbers, token_scale = _quantised(inputs)
    parts = []
    for rows in layer.weight.split(_ROWS):
        matrix, row_scale = _quantised(rows)
        parts.append(torch.nn.functional.linear(numbers, matrix) * row_scale.T)
    outputs = torch.cat(parts, -1) * token_scale
    return (outputs if layer.bias is None else outputs + layer.bias).to(inputs.dtype)
