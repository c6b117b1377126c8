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
    if _vocabulary(path) != _vocabulary(student):
        raise DataError(
            f"`algorithm.teacher` ({path}) has other tokens than `model.path` ({student}): their "
            "tokenizer.json differ in the vocabulary, so log-probs of a token cannot be compared.\n"
            "  Name a teacher of the same family"
        )
    return load_model(path, device, ranks)


def _vocabulary(path: str) -> Any:
    with boundary("trainer", f"read the tokenizer in {path}", DataError):
        found = read_tokenizer(path).get("tokenizer.json")
        return None if found is None else json.loads(found)["model"].get("vocab")
