"""A model's tokens for an engine: the tokenizer that decodes them, and the ids that end a completion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from transformers import AutoConfig, AutoTokenizer

from millrace.core.errors import DataError, boundary
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


def end_ids(model_path: str, tokenizer: Any | None) -> set[int]:
    """Token ids that end a completion: of the tokenizer, the model and its generation configuration.

    The ids are read from the files, without the defaults of transformers, whose Llama ends at token 2.

    Raises: DataError: no file has an id or null. With null a completion ends by its length alone.
    """
    files = [Path(model_path) / name for name in ("config.json", "generation_config.json")]
    entries = [entry for file in files if file.exists() for entry in _end_entry(file)]
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        entries.append(tokenizer.eos_token_id)
    if not entries:
        raise DataError(
            f"{model_path}: no file says which token ends a completion. Set `eos_token_id` in "
            "generation_config.json; null there: only the budget and stop strings end one"
        )
    return {
        token for ids in entries for token in (ids if isinstance(ids, list) else [ids]) if token is not None
    }


class _Ends(msgspec.Struct):
    eos_token_id: int | list[int] | msgspec.UnsetType | None = msgspec.UNSET


def _end_entry(file: Path) -> list[int | list[int] | None]:
    """The file's `eos_token_id` in a list, empty without that key. Raises: DataError."""
    with boundary("the engine", f"`model.path`: read `eos_token_id` in {file}", DataError):
        entry = msgspec.json.decode(file.read_bytes(), type=_Ends).eos_token_id
    return [] if isinstance(entry, msgspec.UnsetType) else [entry]
