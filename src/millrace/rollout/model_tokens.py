"""What an engine must know of a model's tokens: how they are decoded, and which of them end a completion."""

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
    """Of an engine that is not ours. Raises: DataError: as `end_ids`."""
    tokenizer = load_tokenizer(options.model_path)
    return Intake(
        vocab=AutoConfig.from_pretrained(options.model_path).vocab_size,
        max_sequence_tokens=options.max_sequence_tokens,
        eos_ids=end_ids(options.model_path, tokenizer),
        decode=text_decoder(tokenizer),
        engine=f"server {options.server}" if options.server else "the engine",
    )


def load_tokenizer(model_path: str) -> Any | None:
    """The directory's tokenizer, or None where there is none: tokens in, tokens out needs none."""
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

    As the files say, not as transformers fills them in: its Llama ends at token 2 where nobody chose one.

    Raises: DataError: none of them says anything. Null is something: nothing ends but by its length.
    """
    files = [Path(model_path) / name for name in ("config.json", "generation_config.json")]
    said = [_end_said(file) for file in files if file.exists()]
    found = [ids for each in said for ids in each]
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    if not found:
        raise DataError(
            f"{model_path}: no file says which token ends a completion. Set `eos_token_id` in "
            "generation_config.json; null there: only the budget and stop strings end one"
        )
    return {
        token for ids in found for token in (ids if isinstance(ids, list) else [ids]) if token is not None
    }


class _Ends(msgspec.Struct):
    eos_token_id: int | list[int] | msgspec.UnsetType | None = msgspec.UNSET


def _end_said(file: Path) -> list[int | list[int] | None]:
    """What a file says of tokens that end a completion: one thing, or nothing. Raises: DataError."""
    with boundary("the engine", f"`model.path`: read `eos_token_id` in {file}", DataError):
        said = msgspec.json.decode(file.read_bytes(), type=_Ends).eos_token_id
    return [] if isinstance(said, msgspec.UnsetType) else [said]
