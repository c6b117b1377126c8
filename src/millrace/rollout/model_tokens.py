"""A model's tokenizer for an engine, and the intake of an engine with vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from millrace.core.turns.end_ids import end_ids
from millrace.rollout.intake import Intake
from millrace.rollout.protocol import EngineOptions


def open_intake(options: EngineOptions) -> Intake:
    """The intake of an engine with vLLM. Raises: DataError: as `end_ids`."""
    tokenizer = load_tokenizer(options.model_path)
    return Intake(
        vocab=AutoConfig.from_pretrained(options.model_path).vocab_size,
        max_sequence_tokens=options.max_sequence_tokens,
        eos_ids=end_ids(options.model_path, tokenizer),
        decode=text_decoder(tokenizer),
        engine=f"server {options.server}" if options.server else "the engine",
    )


def load_tokenizer(model_path: str) -> Any | None:
    """The directory's tokenizer, or None: an engine takes tokens and gives tokens without a tokenizer."""
    if not (Path(model_path) / "tokenizer_config.json").exists():
        return None
    return AutoTokenizer.from_pretrained(model_path)


def text_decoder(tokenizer: Any | None) -> Callable[[list[int]], str] | None:
    if tokenizer is None:
        return None
    return lambda tokens: tokenizer.decode(
        tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
