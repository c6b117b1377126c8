"""The optimizer of each parameter."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import PreTrainedModel

from millrace.config.tables.training import Optimizer
from millrace.core.errors import ConfigError
from millrace.trainer.optimizer.adamw import make_adamw
from millrace.trainer.ranks.mesh import local
from millrace.trainer.ranks.shares import balanced


def make_optimizer(model: PreTrainedModel, config: Optimizer, threads: int = 1) -> torch.optim.Optimizer:
    """AdamW, or Muon for the matrices of the layers with AdamW for all other parameters. With several
    `threads` each updates a share of the parameters by AdamW: the same bits, because no number needs another.

    Raises: ConfigError: Muon, and the weights are divided among ranks.
    Source:
        torch's Muon, whose updates are scaled to the size of AdamW's (arXiv:2502.16982). So one learning rate
        serves both.
    """
    if config.rule == "adamw":
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        shares = balanced([local(parameter).numel() for parameter in trained], threads)
        each = [make_adamw([trained[index] for index in share], config) for share in shares if share]
        return each[0] if len(each) == 1 else Together(*each, at_once=True)
    matrices: list[Any] = []
    others: list[Any] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        (matrices if ".layers." in name and parameter.ndim == 2 else others).append(parameter)
    if any(hasattr(matrix, "placements") for matrix in matrices):
        raise ConfigError(
            '`optimizer.rule` ("muon") needs whole matrices, and the trainer\'s ranks hold parts of them.\n'
            '  Set it to "adamw", or the trainer to one rank without `trainer.offload`'
        )
    muon = torch.optim.Muon(
        matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return Together(muon, *([make_adamw(others, config)] if others else []))


class Together(torch.optim.Optimizer):
    """Several optimizers as one: one table of states, one list of groups, one step. `at_once`: on a thread
    each."""

    def __init__(self, *optimizers: torch.optim.Optimizer, at_once: bool = False) -> None:
        super().__init__([p for each in optimizers for g in each.param_groups for p in g["params"]], {})
        self._optimizers = optimizers
        self._threads = ThreadPoolExecutor(len(optimizers), "update") if at_once else None
        self.param_groups = [group for each in optimizers for group in each.param_groups]
        for each in optimizers:
            each.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for _ in (self._threads.map if self._threads else map)(lambda each: each.step(), self._optimizers):
            pass
