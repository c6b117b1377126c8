"""Which kernels a loaded model gets, by its device."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from millrace.trainer.kernels import compiled, experts, flash, gate, linear, lookup, norm
from millrace.trainer.ranks.mesh import Ranks


def install_kernels(model: PreTrainedModel, device: torch.device, ranks: Ranks) -> None:
    """Replace slow parts of `model`. A tensor rank's blocks of layers stay as transformers computes them."""
    if device.type == "cpu" and ranks.undivided_matmuls:
        linear.install(model)
        gate.install(model)
        if ranks.alone:
            lookup.install(model)
        norm.install(model)
    if device.type == "cuda":
        flash.activate(device)
        if ranks.tensor == 1:
            experts.install(model)
            compiled.install_where_it_runs(model, device)
