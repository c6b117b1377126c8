"""Proof that an engine computes with the weights that were published.

An engine that fuses, shards and packs its tensors has no tensor whose digest could be compared. So the proof
compares log-probs of fixed tokens with those of the plain Hugging Face model. The plain model computes with
the bytes that the digest is of. The plain model has no weights of its own: it reads the relay's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from millrace.core.digest import NamedBuffer
from millrace.engines.vllm.loading import as_tensor
from millrace.engines.vllm.rounding import quantise

TOKENS = 32

# Bounds of the mean distance of a log-prob, times the log-probs' spread if the spread is above 1: rounding
# grows with the spread. In bfloat16 rounding took up to 0.05 of the spread (docs/archive/experiments.md).
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
