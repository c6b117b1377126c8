"""Make an engine from a Hugging Face model directory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoTokenizer

from millrace.core.errors import DataError, boundary
from millrace.placement.device import torch_device
from millrace.rollout.architecture import read_architecture
from millrace.rollout.engine import TorchEngine
from millrace.rollout.protocol import EngineOptions


def open_engine(options: EngineOptions) -> TorchEngine:
    """See `load_engine`; without weights."""
    asked = msgspec.structs.asdict(options)
    device = torch_device(asked.pop("device"), asked.pop("device_share"))
    return load_engine(asked.pop("model_path"), weights=False, device=device.type, **asked)


def load_engine(
    model_path: str,
    *,
    weights: bool = True,
    dtype: str = "float32",
    device: str = "auto",
    slots: int = 32,
    max_sequence_tokens: int = 512,
    prefill_chunk: int = 512,
    exact: bool = False,
    recompute: bool = True,
) -> TorchEngine:
    """An engine for the model in `model_path`.

    With `weights` it serves the directory's own as version 0; without, it reads no weight file and
    serves nothing until its first swap. `device` "auto" is cuda where there is one.
    Raises: DataError for a model the engine cannot run or read; ConfigError for a device that is not there,
    or where exactness cannot be had.
    """
    reading = partial(boundary, "the engine", f"`model.path`: read the model in {model_path}", DataError)
    architecture = read_architecture(model_path)
    with reading():
        tokenizer = load_tokenizer(model_path)
        eos_ids = end_ids(model_path, tokenizer)
    engine = TorchEngine(
        architecture,
        dtype=getattr(torch, dtype),
        device=torch_device(device),
        slots=slots,
        max_sequence_tokens=max_sequence_tokens,
        prefill_chunk=prefill_chunk,
        exact=exact,
        recompute=recompute,
        eos_ids=eos_ids,
        decode=text_decoder(tokenizer),
    )
    if weights:
        with reading():
            engine.load_standby(model_path)
        engine.swap(0)
    return engine


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
