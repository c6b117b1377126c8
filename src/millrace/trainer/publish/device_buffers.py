"""Weights that are published from a GPU: it copies them into the slot by itself, and digests them where they
are. Nothing of them is held on the host."""

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
from millrace.devices.pinned import copy_from_device, pinned
from millrace.trainer.ranks.blocks import owned_blocks


class DeviceBuffers:
    """This rank's parts of the weights, as bytes in the published dtype, where they are trained.

    A part in another dtype is rounded when its turn comes: a copy needs room for one such part at a time.

    Attributes:
        manifest  where the whole weights lie in a slot
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device) -> None:
        told, self._dtype, self._device = str(dtype).removeprefix("torch."), dtype, device
        self.manifest = lay_out(
            (name, told, tuple(weight.shape), weight.numel() * dtype.itemsize)
            for name, weight in weights.items()
        )
        self._owned = owned_blocks(weights)
        self._blocks = [
            NamedBuffer(part.name, told, tuple(part.block.shape), b"", part.start) for part in self._owned
        ]

    @property
    def weights_bytes(self) -> int:
        """Of one version, whoever holds it: what a slot must have."""
        return sum(spec.num_bytes for spec in self.manifest)

    def copy(self, writer: WeightsWriter, filling: Filling) -> None:
        """The current weights, into the slot of `filling`. All are there at the end."""
        writer.pin(pinned)
        rounded = (part.block.to(self._dtype) for part in self._owned)
        copy_from_device(self._device, rounded, writer.places(filling, self.manifest, self._blocks))

    def block_digests(self, after: Any = None) -> list[NamedBlock]:
        """What was copied, with digests taken of the weights themselves, beside what the device computes
        `after` that mark."""
        with side_stream(self._device, after):
            digests = tensor_digests((part.block for part in self._owned), self._dtype)
        return [
            (block.name, BlockDigest(part.start, block.shape, digest))
            for part, block, digest in zip(self._owned, self._blocks, digests, strict=True)
        ]

    def digest(self) -> str:
        """Of this rank's parts of the current weights."""
        pieces, told = self.block_digests(mark(self._device)), str(self._dtype).removeprefix("torch.")
        return version_digest(((name, told, p.shape, p.digest) for name, p in pieces), MULTILINEAR)
