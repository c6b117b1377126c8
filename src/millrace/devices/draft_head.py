"""The head of the trained drafter: one function, for the trainer and for the replicas.

The head guesses the policy's next final hidden state. The policy's own output projection, frozen, makes
logits of the guess. Shape suffixes: N = positions, H = hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F

from millrace.core.supported import DRAFTER

EPS = 1e-6


@dataclass(frozen=True, eq=False)
class DraftHead:
    """The tensors of a head.

    fuse     (H, 2 H) of the state and of the token after it
    gate_up  (2 H, H) of a gated layer beside it
    down     (H, H)   of that layer's output
    """

    fuse: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    def __call__(self, states_NH: torch.Tensor, embedded_NH: torch.Tensor) -> torch.Tensor:
        """Guess the final hidden state one position later: (N, H).

            x = fuse [n(h), n(e)],   h' = x + down (silu(g) u),   [g, u] = gate_up n(x)

        h is the policy's state behind its last norm, or an earlier guess. e is the embedding of the token
        that was sampled from h. n divides by the root mean square.

        Source:
            EAGLE, arXiv:2401.15077: state and next token give the next state. EAGLE-3, arXiv:2503.01840:
            several tokens by feeding guesses back, in training too. Here there is no attention.
        """
        x = F.linear(torch.cat([_normed(states_NH), _normed(embedded_NH)], dim=-1), self.fuse)
        gate, up = F.linear(_normed(x), self.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """By the names that a version of weights has them under."""
        return {DRAFTER + field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> DraftHead:
        """The inverse of `tensors`; others are ignored."""
        return cls(**{field.name: tensors[DRAFTER + field.name] for field in fields(cls)})


def shapes(hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Of the head's tensors, by name."""
    h = hidden_size
    return {f"{DRAFTER}fuse": (h, 2 * h), f"{DRAFTER}gate_up": (2 * h, h), f"{DRAFTER}down": (h, h)}


def first_head(hidden_size: int, seed: int, device: torch.device) -> DraftHead:
    """The head of version 0, equal for equal seeds: normal numbers, and zeros in `down`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) / math.sqrt(shape[1])
        for name, shape in shapes(hidden_size).items()
    }
    tensors[f"{DRAFTER}down"].zero_()
    return DraftHead.of({name: tensor.to(device) for name, tensor in tensors.items()})


def _normed(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=EPS)
