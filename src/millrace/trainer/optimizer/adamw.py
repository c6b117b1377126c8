"""AdamW with moments in float32 or in 8 bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from millrace.config.tables.training import Optimizer
from millrace.core.errors import ConfigError, boundary
from millrace.trainer.optimizer.weight_decay import decays

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
    tables = [{"params": members, "weight_decay": decay} for decay, members in groups.items()]
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
