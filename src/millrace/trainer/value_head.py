"""A critic: a linear head on the last hidden states of the trained model. Replicas never get it.

Shape suffixes: N = tokens, H = hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from millrace.algorithms.critic import Critic
from millrace.core.errors import TrainingError
from millrace.trainer.ranks.mesh import Ranks

OWN = "value_head."  # what its tensors are called in a checkpoint


class ValueHead(torch.nn.Module):
    """It begins at 0, so that the first advantages are those without a critic. It has an optimizer of its
    own. Ranks hold it whole, and sum its gradients."""

    def __init__(self, critic: Critic, hidden_size: int, device: torch.device) -> None:
        super().__init__()
        self.critic = critic
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, device=device))
        self.bias = torch.nn.Parameter(torch.zeros((), device=device))
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=critic.lr, weight_decay=0.0)

    def forward(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Values: (N,), at least float32.

            V = w h / H + b

        The division makes a step of Adam as large for a wide model as for a narrow one: V moves by at most
        lr (mean |h| + 1).
        """
        fixed_NH = hidden_NH.detach()
        if self.critic.trunk and hidden_NH.requires_grad:
            fixed_NH = fixed_NH + self.critic.trunk * (hidden_NH - fixed_NH)
        wide = torch.promote_types(fixed_NH.dtype, self.weight.dtype)
        with torch.autocast(fixed_NH.device.type, enabled=False):
            return fixed_NH.to(wide) @ self.weight.to(wide) / len(self.weight) + self.bias

    def share_gradient(self, ranks: Ranks) -> None:
        """Sum it over ranks; ranks of one tensor group saw the same tokens. A collective call.

        Raises: TrainingError: it is not finite.
        """
        own = [p.grad for p in self.parameters() if p.grad is not None and ranks.tensor_index == 0]
        told = [grad.double().cpu().numpy() for grad in own]
        for parameter, parts in zip(self.parameters(), _by_parameter(ranks.gather(told)), strict=True):
            total = torch.from_numpy(np.asarray(sum(parts))).to(parameter)
            parameter.grad = total.expand(parameter.shape).clone()
            if not math.isfinite(total.sum().item()):
                raise TrainingError("the gradient of the value head is not finite")

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that a checkpoint needs, as `{state}/value_head.{name}`."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.named_parameters():
            found[f"value/{OWN}{name}"] = parameter.detach()
            found |= {f"{key}/{OWN}{name}": state for key, state in self.optimizer.state[parameter].items()}
        return found

    def restore(self, saved: Mapping[str, torch.Tensor]) -> None:
        """What `tensors` gave. Nothing: a checkpoint of another algorithm, and the head begins anew."""
        parameters: dict[str, Any] = dict(self.named_parameters())
        self.optimizer.state.clear()
        for key_and_name, tensor in saved.items():
            key, name = key_and_name.split(f"/{OWN}")
            if key == "value":
                parameters[name].data.copy_(tensor)
            else:
                where = "cpu" if key == "step" else parameters[name].device
                self.optimizer.state[parameters[name]][key] = tensor.clone().to(where)


def _by_parameter(told: list[list[NDArray[Any]]]) -> list[list[NDArray[Any]]]:
    """For weight and bias the gradients of all ranks that have one."""
    return [[grads[i] for grads in told if grads] for i in range(2)]


def value_metrics(values_N: NDArray[Any], returns_N: NDArray[Any]) -> dict[str, float]:
    """Before the first step of a batch: `value_mean`, and `value_explained`, the share of the returns'
    variance that the values explain (1: all, 0: as a constant does, below: worse)."""
    if not values_N.size:
        return {}
    spread = float(np.var(returns_N))
    explained = 1.0 - float(np.var(returns_N - values_N)) / spread if spread > 0 else 0.0
    return {"value_mean": float(values_N.mean()), "value_explained": explained}
