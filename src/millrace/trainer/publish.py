"""The current weights as bytes, and how the ranks of a trainer bring them into a relay's slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain

import torch

from millrace.core.digest import Filling, NamedBuffer, lay_out, version_digest
from millrace.core.protocols import WeightsWriter
from millrace.trainer.mesh import ALONE, Ranks, agreed
from millrace.trainer.parts import parts


class PublishBuffers:
    """Preallocated host copies of this rank's parts of the weights, in the published dtype.

    A part that is on the CPU in that dtype already is published from where it lies. Fresh pages are
    ten times slower than warm ones, so nothing is allocated per version.

    Attributes:
        manifest  where the whole weights lie in a slot
        blocks    this rank's, as bytes: `fill` brings them up to the current weights
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        told = str(dtype).removeprefix("torch.")
        self.manifest = lay_out(
            (name, told, tuple(weight.shape), weight.numel() * dtype.itemsize)
            for name, weight in weights.items()
        )
        self._parts = [(part, _host_copy(part.block, dtype)) for part in parts(weights)]
        self.blocks = [
            NamedBuffer(
                part.name,
                told,
                tuple(host.shape),
                host.view(-1).view(torch.uint8).numpy(),
                None if host.shape == part.shape else part.start,
            )
            for part, host in self._parts
        ]

    @property
    def weights_bytes(self) -> int:
        """Of one version, whoever holds it: what a slot must have. Manifests have room of their own."""
        return sum(spec.num_bytes for spec in self.manifest)

    def fill(self) -> list[NamedBuffer]:
        """The blocks of the current weights. They stay valid until the next step."""
        for part, host in self._parts:
            if part.block.data_ptr() != host.data_ptr():
                host.copy_(part.block, non_blocking=part.block.is_cuda)  # all in line, waited for once
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        return self.blocks


def publish(
    opened: Callable[[], WeightsWriter], version: int, buffers: PublishBuffers, ranks: Ranks = ALONE
) -> tuple[str, str]:
    """Write this rank's buffers and no others'. The first rank begins the version, and ends it after all.

    Only digests go from rank to rank. Where one rank fails all fail, so that none waits for another.

    Returns: digests (of the version, of this rank's buffers).
    """
    if ranks.world == 1:
        digest = opened().write(version, buffers.fill())
        return digest, digest
    first, manifest = ranks.rank == 0, buffers.manifest

    def begin() -> Filling | None:
        writer = opened()
        return writer.begin(version, manifest) if first else None

    filling = agreed(ranks, begin)[0]
    assert filling is not None, version
    written = agreed(ranks, lambda: opened().fill(filling, manifest, buffers.fill()))
    digests = agreed(ranks, lambda: opened().end(filling, manifest, chain(*written)) if first else "")
    mine = zip(buffers.blocks, written[ranks.rank], strict=True)
    return digests[0], version_digest((b.name, b.dtype, b.shape, piece.digest) for b, (_, piece) in mine)


def _host_copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.device.type == "cpu" and tensor.dtype == dtype and tensor.is_contiguous():
        return tensor
    return torch.empty(tensor.shape, dtype=dtype, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)
