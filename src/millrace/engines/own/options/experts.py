"""The experts that decode steps chose, beside the tokens that were sampled then."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from millrace.core.completion.routing import Routing
from millrace.engines.own.architecture import Architecture
from millrace.rollout.continuation import Continuation


def routing_memory(architecture: Architecture, rows: int, device: torch.device) -> torch.Tensor:
    """Memory for the experts of a decode step: (rows, layers with experts, experts of a row). Recorded steps
    write into the same memory every time."""
    layers = [shape for name, shape in architecture.shapes.items() if name.endswith(".experts.gate_up_proj")]
    dtype = torch.uint8 if Routing.typecode(layers[0][0]) == "B" else torch.uint16
    return torch.zeros((rows, len(layers), architecture.routed), dtype=dtype, device=device)


def recorded_routing(
    experts_MLK: torch.Tensor | None, continuations: Sequence[Continuation], rows: Sequence[int]
) -> list[Routing | None]:
    """The experts of each of `continuations` that asks for them, after a pass where it had this row."""
    wanted = [continuation.work.sampling.routing for continuation in continuations]
    if experts_MLK is None or not any(wanted):
        return [None] * len(wanted)
    typecode = "B" if experts_MLK.dtype == torch.uint8 else "H"
    experts = experts_MLK[: max(rows) + 1].flatten(1).cpu().numpy()[list(rows)]
    return [
        Routing(row.size, array(typecode, row.tobytes())) if asked else None
        for row, asked in zip(experts, wanted, strict=True)
    ]
