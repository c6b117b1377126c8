"""A checkpoint as a Hugging Face directory, like the one that a run ends with."""

from __future__ import annotations

from pathlib import Path

import torch

from millrace.trainer.checkpoint import atomic_directory, load_weights
from millrace.trainer.model import load_model, read_tokenizer, save_model


def export_checkpoint(checkpoint: Path, out: Path, *, model_path: str, dtype: str) -> None:
    """`model_path`: what the run started from. `dtype`: of the written weights.

    Raises: DataError: the checkpoint is damaged, or of another model; `out` holds something else.
    """
    model = load_model(model_path, torch.device("cpu"))
    load_weights(model, checkpoint)
    with atomic_directory(out, marker="config.json") as directory:
        save_model(model, read_tokenizer(model_path), directory, getattr(torch, dtype))
