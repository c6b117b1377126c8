"""The experts that decode steps chose, beside the tokens that were sampled then."""

from __future__ import annotations

from array import array

import torch

from millrace.core.completion.routing import Routing
from millrace.engines.own.architecture import Architecture
from millrace.engines.own.decode import DecodeBatch


def routing_memory(architecture: Architecture, rows: int, device: torch.device) -> torch.Tensor:
    """Memory for the experts of a decode step: (rows, layers with experts, experts of a row). Recorded steps
    write into the same memory every time."""
    layers = [shape for name, shape in architecture.shapes.items() if name.endswith(".experts.gate_up_proj")]
    dtype = torch.uint8 if Routing.typecode(layers[0][0]) == "B" else torch.uint16
    return torch.zeros((rows, len(layers), architecture.routed), dtype=dtype, device=device)


def recorded_routing(experts_MLK: torch.Tensor | None, batch: DecodeBatch) -> list[Routing | None]:
    """The experts of each continuation of `batch` that asks for them, after its step."""
    wanted = [continuation.work.sampling.routing for continuation in batch.continuations]
    if experts_MLK is None or not any(wanted):
        return [None] * len(wanted)
    typecode = "B" if experts_MLK.dtype == torch.uint8 else "H"
    rows = experts_MLK[: batch.count].flatten(1).cpu().numpy()[batch.slots]
    return [
        Routing(row.size, array(typecode, row.tobytes())) if asked else None
        for row, asked in zip(rows, wanted, strict=True)
    ]
