"""Proof that an engine computes with the weights that were published.

An engine that fuses, shards and packs its tensors has none left whose digest could be compared. So its
log-probs of fixed tokens are compared with those of the plain Hugging Face model, computed from the very
bytes that the digest is of. The plain model has no weights of its own: it reads the relay's memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from millrace.core.digest import NamedBuffer
from millrace.engines.vllm.loading import as_tensor

TOKENS = 32

# Of the mean distance of a log-prob, times their spread where that is above 1: rounding grows with it. In
# bfloat16 rounding took up to 0.05 of the spread (docs/archive/experiments.md).
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}


class Proof:
    """`tokens`: what an engine is asked the log-probs of."""

    def __init__(self, model_path: str, dtype: torch.dtype, *, tokens_max: int) -> None:
        logging.disable_progress_bar()
        config = AutoConfig.from_pretrained(model_path)
        self._model = _without_weights(config, dtype)
        self._tolerance = TOLERANCE[dtype]
        count, generator = min(TOKENS, tokens_max), torch.Generator().manual_seed(0)
        self.tokens: list[int] = torch.randint(config.vocab_size, (count,), generator=generator).tolist()

    @torch.inference_mode()
    def expected(self, pieces: Sequence[NamedBuffer]) -> torch.Tensor:
        """Log-probs of all tokens but the first, (TOKENS - 1,), under the weights in `pieces`."""
        named = {piece.name: as_tensor(piece) for piece in pieces}
        tokens = torch.tensor(self.tokens)
        given = (tokens[None],), {"use_cache": False}
        logits = torch.func.functional_call(self._model, named, *given, strict=False).logits[0]
        logprobs = logits.float().log_softmax(dim=-1)
        return logprobs[:-1].gather(1, tokens[1:, None])[:, 0]

    def distance(self, expected: torch.Tensor, found: Sequence[float]) -> float:
        """Mean distance in units of what rounding may do: above 1 the weights are others. Of what is expected
        to be a number; 0 if nothing is: the next step will say so."""
        numbers = expected.isfinite()
        if not numbers.any():
            return 0.0
        wanted, told = expected[numbers], torch.tensor(found)[numbers]
        mean = (wanted - told).abs().mean().nan_to_num(torch.inf)
        return float(mean) / (self._tolerance * max(1.0, float(wanted.std(correction=0))))


def _without_weights(config: object, dtype: torch.dtype) -> torch.nn.Module:
    """The model with its buffers, and with parameters that are one number each, seen in their shapes."""
    with torch.device("meta"):
        shaped = AutoModelForCausalLM.from_config(config)
    one = torch.zeros((), dtype=dtype)
    seen = {name: one.expand(parameter.shape) for name, parameter in shaped.named_parameters()}
    model: torch.nn.Module = type(shaped).from_pretrained(None, config=config, state_dict=seen, dtype=dtype)
    return model.eval()
