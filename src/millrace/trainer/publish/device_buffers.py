"""Weights that are published from a GPU. The GPU copies them into the slot and digests them; the host keeps
no copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from millrace.core.digest import (
    MULTILINEAR,
    BlockDigest,
    Filling,
    NamedBlock,
    NamedBuffer,
    lay_out,
    version_digest,
)
from millrace.core.protocols import WeightsWriter
from millrace.devices.device_digest import tensor_digests
from millrace.devices.gpu import mark, side_stream
from millrace.devices.pinned import copy_from_device, page_areas, pinned
from millrace.trainer.ranks.blocks import owned_blocks


class DeviceBuffers:
    """This rank's blocks of the weights, as bytes in the published dtype, on the device that trains them.

    A block in another dtype is rounded when its turn comes, so a copy needs room for one such block at a
    time.

    Attributes:
        manifest  the places of the whole weights in a slot
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device) -> None:
        dtype_name, self._dtype, self._device = str(dtype).removeprefix("torch."), dtype, device
        self.manifest = lay_out(
            (name, dtype_name, tuple(weight.shape), weight.numel() * dtype.itemsize)
            for name, weight in weights.items()
        )
        self._owned = owned_blocks(weights)
        self._blocks = [
            NamedBuffer(owned.name, dtype_name, tuple(owned.block.shape), b"", owned.start)
            for owned in self._owned
        ]

    @property
    def weights_bytes(self) -> int:
        """Bytes of one version, which a slot must have: the blocks of all ranks."""
        return sum(spec.num_bytes for spec in self.manifest)

    def copies(self) -> list[torch.Tensor]:
        """None: a block is rounded when its turn comes."""
        return []

    def copy(self, writer: WeightsWriter, filling: Filling) -> None:
        """Copy the current weights into the slot of `filling`. The copy is done at the end."""
        places = writer.places(filling, self.manifest, self._blocks)
        writer.pin(pinned, page_areas(places))
        rounded = (owned.block.to(self._dtype) for owned in self._owned)
        copy_from_device(self._device, rounded, places)

    def block_digests(self, after: Any = None) -> list[NamedBlock]:
        """The digests of this rank's blocks, of the weights and not of the copy. The device computes them
        beside its other work, `after` a mark."""
        with side_stream(self._device, after):
            digests = tensor_digests((owned.block for owned in self._owned), self._dtype)
        return [
            (block.name, BlockDigest(owned.start, block.shape, digest))
            for owned, block, digest in zip(self._owned, self._blocks, digests, strict=True)
        ]

    def digest(self) -> str:
        """The digest of this rank's blocks of the current weights."""
        blocks, dtype_name = self.block_digests(mark(self._device)), str(self._dtype).removeprefix("torch.")
        return version_digest(((name, dtype_name, b.shape, b.digest) for name, b in blocks), MULTILINEAR)
