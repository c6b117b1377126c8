"""The optimizer: AdamW by parameter, Muon for matrices, and the norm of all gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from millrace.config.tables.training import Optimizer
from millrace.core.errors import ConfigError, boundary
from millrace.trainer.batch.batch_step import decays
from millrace.trainer.ranks.mesh import ALONE, Ranks, local


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


INNER = ("codes", "scale")  # of an 8-bit moment: its numbers, and the scale of each block of 256


def make_adamw(parameters: Iterable[Any], config: Optimizer) -> torch.optim.Optimizer:
    """AdamW for `parameters`: (name, parameter) as of `named_parameters()`, or parameters alone, of which the
    dimensions decide whether they have weight decay.

    Raises: ConfigError: `optimizer.states` needs torchao, which cannot be imported.

    Source:
        8-bit moments: arXiv:2110.02861. Tensors of less than 4096 numbers keep float32.
    """
    groups: dict[float, list[Any]] = {}
    for name, parameter in (each if isinstance(each, tuple) else ("", each) for each in parameters):
        decay = config.weight_decay if decays(name, parameter.ndim) else 0.0
        groups.setdefault(decay, []).append(parameter)
    tables: list[dict[str, Any]] = [
        {"params": members, "weight_decay": decay} for decay, members in groups.items()
    ]
    options: dict[str, Any] = config.model_dump(include={"lr", "betas", "eps"})
    if config.states == "float32":
        return torch.optim.AdamW(tables, **options, fused=True)
    with boundary("trainer", '`optimizer.states` ("8bit"): import torchao', ConfigError):
        from torchao.optim import AdamW8bit
    optimizer: torch.optim.Optimizer = AdamW8bit(tables, **options)
    if not tables[0]["params"][0].is_cuda:  # compiling the step for a CPU takes minutes
        optimizer.step = torch.compiler.set_stance("force_eager")(optimizer.step)  # type: ignore[method-assign]
    return optimizer


def plain_tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A parameter's state as plain tensors: an 8-bit moment is two tensors."""
    plain: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        inner = {f"{key}.{i}": getattr(value, i) for i in INNER if hasattr(value, i)}
        plain |= inner or {key: value}
    return plain


def rebuild_moments(state: dict[str, Any]) -> None:
    """The inverse of `plain_tensors`, in place."""
    for key in [key for key in state if key.endswith(f".{INNER[0]}")]:
        from torchao.optim.subclass_8bit import OptimState8bit

        moment = key.rpartition(".")[0]
        codes, scale = (state.pop(f"{moment}.{i}") for i in INNER)
        signed = moment == "exp_avg"
        levels = OptimState8bit.zeros((256,), signed, device=codes.device).qmap
        state[moment] = OptimState8bit(codes, scale, levels, signed, dtype=torch.float32)


def grad_norm(parameters: Iterable[torch.nn.Parameter], ranks: Ranks = ALONE) -> torch.Tensor:
    """Euclidean norm of all gradients of all ranks; not finite if a gradient is not. The same on every
    rank."""
    grads = [p.grad for p in parameters if p.grad is not None and (ranks.tensor_index == 0 or _divided(p))]
    norm = torch.nn.utils.get_total_norm([local(grad) for grad in grads])
    if ranks.world == 1:
        return norm
    return torch.tensor(math.hypot(*ranks.gather(norm.item())), dtype=norm.dtype, device=norm.device)


def _divided(parameter: Any) -> bool:
    """Whether the ranks of a tensor group have different blocks of `parameter`."""
    place = parameter.placements[-1]
    return not place.is_replicate()


def clip_gradients(parameters: Iterable[torch.nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their norm is at most `max_norm`."""
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
