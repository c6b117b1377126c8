"""The optimizer of each parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from millrace.config.tables.training import Optimizer
from millrace.core.errors import ConfigError
from millrace.trainer.optimizer.adamw import make_adamw
from millrace.trainer.optimizer.weight_decay import decays


def make_optimizer(model: PreTrainedModel, config: Optimizer) -> torch.optim.Optimizer:
    """AdamW, or Muon for the matrices of the layers with AdamW for all other parameters.

    Raises: ConfigError: Muon, and the weights are divided among ranks.
    Source:
        torch's Muon, whose updates are scaled to the size of AdamW's (arXiv:2502.16982). So one learning rate
        serves both.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if config.rule == "adamw":
        return make_adamw(trained, config)
    matrices: list[Any] = [p for name, p in trained if is_matrix(name, p)]
    others = [(name, p) for name, p in trained if not is_matrix(name, p)]
    if any(hasattr(matrix, "placements") for matrix in matrices):
        raise ConfigError(
            '`optimizer.rule` ("muon") needs whole matrices, and the trainer\'s ranks hold parts of them.\n'
            '  Set it to "adamw", or the trainer to one rank without `trainer.offload`'
        )
    muon = torch.optim.Muon(
        matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return Together(muon, *([make_adamw(others, config)] if others else []))


def is_matrix(name: str, parameter: torch.nn.Parameter) -> bool:
    """Whether Muon updates it: a matrix of a layer, and not biases or scales that are one matrix."""
    return ".layers." in name and parameter.ndim == 2 and decays(name, 2)


class Together(torch.optim.Optimizer):
    """Several optimizers as one: one table of states, one list of groups, one step."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        super().__init__([p for each in optimizers for g in each.param_groups for p in g["params"]], {})
        self._optimizers = optimizers
        self.param_groups = [group for each in optimizers for group in each.param_groups]
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for each in self._optimizers:
            each.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of any optimizer. It makes new tables, so they are shared again."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Each optimizer works on the table and on its part of the groups of this one."""
        groups = iter(self.param_groups)
        for each in self._optimizers:
            each.state = self.state
            each.param_groups = [next(groups) for _ in each.param_groups]
