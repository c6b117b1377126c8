"""The teacher of on-policy distillation: a frozen model with the same tokens."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from millrace.trainer.files.tokens import refuse_other_tokens
from millrace.trainer.model import load_model
from millrace.trainer.ranks.mesh import Ranks


def load_teacher(path: str, *, student: str, device: torch.device, ranks: Ranks) -> PreTrainedModel:
    """The model in `path`. `student`: the directory of the model that is trained.

    Raises: DataError: `path` is no model, or the model has other tokens.
    """
    refuse_other_tokens(path, student)
    return load_model(path, device, ranks)
