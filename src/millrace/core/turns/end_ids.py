"""Which tokens end a turn, by the files of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from millrace.core.errors import DataError, boundary


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
    with boundary("the model", f"`model.path`: read `eos_token_id` in {file}", DataError):
        entry = msgspec.json.decode(file.read_bytes(), type=_Ends).eos_token_id
    return [] if isinstance(entry, msgspec.UnsetType) else [entry]
