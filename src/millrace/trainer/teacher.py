"""The teacher of on-policy distillation: a frozen model with the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from millrace.core.errors import DataError, boundary
from millrace.trainer.mesh import Ranks
from millrace.trainer.model import load_model, read_tokenizer


def load_teacher(path: str, *, student: str, device: torch.device, ranks: Ranks) -> PreTrainedModel:
    """The model in `path`. `student`: the directory of the model that is trained.

    Raises: DataError: it is no model, or calls its tokens otherwise.
    """
    if not (Path(path) / "config.json").is_file():
        raise DataError(f"`algorithm.teacher` ({path}) is not a model directory: it has no config.json")
    (vocabulary, added), (own, own_added) = _tokens(path), _tokens(student)
    if vocabulary != own or (odd := sorted(own_added - added)):
        differ = "the vocabulary" if vocabulary != own else f"the added tokens {odd[:4]}"
        raise DataError(
            f"`algorithm.teacher` ({path}) has other tokens than `model.path` ({student}): their "
            f"tokenizers differ in {differ}, so log-probs of a token cannot be compared.\n"
            "  Name a teacher of the same family"
        )
    return load_model(path, device, ranks)


def _tokens(path: str) -> tuple[Any, set[tuple[int, str]]]:
    """The vocabulary, and what is added to it. A teacher may have more of the latter."""
    with boundary("trainer", f"read the tokenizer in {path}", DataError):
        files = read_tokenizer(path)
        if "tokenizer.json" not in files:
            return files.get("tokenizer.model"), set()
        found = json.loads(files["tokenizer.json"])
        added = {(token["id"], token["content"]) for token in found.get("added_tokens", ())}
        return found["model"].get("vocab"), added
