"""A critic: a linear head on the last hidden states of the trained model. Replicas never get it.

Shape suffixes: N = tokens, H = hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from millrace.algorithms.advantages import Critic
from millrace.core.errors import TrainingError
from millrace.trainer.ranks.mesh import Ranks

PREFIX = "value_head."  # of the head's tensors in a checkpoint


class ValueHead(torch.nn.Module):
    """The head begins at 0, so that the first advantages are those without a critic. The head has an
    optimizer of its own. Every rank has the whole head, and ranks sum its gradients."""

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
        """Sum the gradient over ranks; ranks of one tensor group have the same tokens. A collective call.

        Raises: TrainingError: the gradient is not finite.
        """
        grads = [p.grad for p in self.parameters() if p.grad is not None and ranks.tensor_index == 0]
        of_ranks = ranks.gather([grad.double().cpu().numpy() for grad in grads])
        for parameter, *summands in zip(self.parameters(), *filter(None, of_ranks), strict=True):
            total = torch.from_numpy(np.asarray(sum(summands))).to(parameter)
            parameter.grad = total.expand(parameter.shape).clone()
            if not math.isfinite(total.sum().item()):
                raise TrainingError("the gradient of the value head is not finite")

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that a checkpoint needs, as `{state}/value_head.{name}`."""
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self.named_parameters():
            states = {"value": parameter.detach()} | self.optimizer.state[parameter]
            tensors |= {f"{key}/{PREFIX}{name}": state for key, state in states.items()}
        return tensors

    def restore(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Restore the tensors of `tensors`. If `saved` is empty, the checkpoint is of another algorithm, and
        the head begins anew."""
        parameters: dict[str, Any] = dict(self.named_parameters())
        self.optimizer.state.clear()
        for key_and_name, tensor in saved.items():
            key, name = key_and_name.split(f"/{PREFIX}")
            if key == "value":
                parameters[name].data.copy_(tensor)
            else:
                where = "cpu" if key == "step" else parameters[name].device
                self.optimizer.state[parameters[name]][key] = tensor.clone().to(where)
