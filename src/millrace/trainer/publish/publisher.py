"""Publishing: the current weights as bytes, which the ranks of a trainer copy into a relay's slot. A GPU
copies its weights into the slot and digests them; the host keeps no copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from millrace.core.digest import (
    MULTILINEAR,
    BlockDigest,
    Filling,
    NamedBlock,
    NamedBuffer,
    digest_blocks,
    digest_buffers,
    lay_out,
    version_digest,
)
from millrace.core.protocols import WeightsWriter
from millrace.core.types import Endpoint, Published
from millrace.devices.gpu import has_own_memory, mark, side_stream, tensor_digests
from millrace.devices.large_memory import each
from millrace.devices.pinned import copy_from_device, page_areas, pinned
from millrace.trainer.publish.fillings import begin_on_hosts, end_on_host
from millrace.trainer.publish.rechecked import RecheckedPublisher, digest_of
from millrace.trainer.ranks.blocks import owned_blocks
from millrace.trainer.ranks.mesh import ALONE, Ranks, agreed, all_or_none, first_alone


class PublishBuffers:
    """Preallocated host copies of this rank's blocks of the weights, in the published dtype.

    A block that is on the CPU in that dtype is published without a copy. Fresh pages are ten times slower
    than warm pages, so nothing is allocated per version.

    Attributes:
        manifest  the places of the whole weights in a slot
        blocks    this rank's blocks as bytes; `fill` updates them to the current weights
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        dtype_name = str(dtype).removeprefix("torch.")
        self.manifest = lay_out(
            (name, dtype_name, tuple(weight.shape), weight.numel() * dtype.itemsize)
            for name, weight in weights.items()
        )
        self._owned = [(owned, _host_copy(owned.block, dtype)) for owned in owned_blocks(weights)]
        self.blocks = [
            NamedBuffer(
                owned.name,
                dtype_name,
                tuple(host.shape),
                host.view(-1).view(torch.uint8).numpy(),
                None if host.shape == owned.shape else owned.start,
            )
            for owned, host in self._owned
        ]

    @property
    def weights_bytes(self) -> int:
        """Bytes of one version, which a slot must have: the blocks of all ranks. Manifests have other
        room."""
        return sum(spec.num_bytes for spec in self.manifest)

    def fill(self) -> list[NamedBuffer]:
        """The blocks of the current weights. They stay valid until the next step."""
        for owned, host in self._owned:
            if owned.block.data_ptr() != host.data_ptr():
                host.copy_(owned.block)
        return self.blocks

    def copies(self) -> list[torch.Tensor]:
        """What `fill` writes anew: they need not be kept until then."""
        return [host for owned, host in self._owned if owned.block.data_ptr() != host.data_ptr()]

    def copy(self, writer: WeightsWriter, filling: Filling) -> None:
        """Copy the current weights into the slot of `filling`."""
        writer.fill(filling, self.manifest, self.fill())

    def block_digests(self) -> list[NamedBlock]:
        """The digests of this rank's blocks, of the buffers and not of the copy."""
        return digest_blocks(self.blocks, each=each)

    def digest(self) -> str:
        """The digest of this rank's blocks of the current weights."""
        return digest_buffers(self.fill(), each=each)


def buffers_of(weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> PublishBuffers | DeviceBuffers:
    """The buffers that publish this rank's blocks: of the device that has all of them, else of the host."""
    devices = {owned.block.device for owned in owned_blocks(weights)}
    if len(devices) == 1 and has_own_memory(device := devices.pop()):
        return DeviceBuffers(weights, dtype, device)
    return PublishBuffers(weights, dtype)


class Publisher(RecheckedPublisher):
    """Publishes versions of weights that `optimizer` updates. The trainer waits only for the copy of this
    rank's `buffers`. The weights are digested during the next step.

    Only digests go from rank to rank. The first rank of each host begins a version in a slot of its relay,
    and ends the version when every rank has copied. An error on one rank is raised on every rank, so no rank
    waits.
    """

    def __init__(
        self,
        buffers: PublishBuffers | DeviceBuffers,
        optimizer: torch.optim.Optimizer,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(ranks)
        self.buffers = buffers
        optimizer.register_step_pre_hook(lambda *_: self.before_update())

    def begin(self, opened: Callable[[], WeightsWriter], endpoint: Endpoint, version: int) -> None:
        """Copy the weights into a slot of `endpoint`, this host's relay, with the writer of `opened`. The
        weights may be trained on at once. A repeat writes nothing, because it would cost the readers a slot.
        If only other hosts have a new endpoint, this host's slot stays."""
        began_s, ranks = time.perf_counter(), self._ranks
        stays = self._overlapped.wait() and self._begun == (endpoint, version)
        if stays and ranks.hosts == 1:
            return
        fillings = self._fillings(opened, endpoint, version, stays=stays)
        if not any(fillings):
            return
        self._begun, self._fresh = (endpoint, version), True
        writer, filling, fault = opened(), fillings[ranks.host], None
        try:
            if filling is not None:
                self.buffers.copy(writer, filling)
        except Exception as error:
            fault = error  # `_end` raises the error on every rank
        self._overlapped.begin(partial(self._end, writer, version, filling, fault), began_s)

    def _fillings(
        self, opened: Callable[[], WeightsWriter], endpoint: Endpoint, version: int, *, stays: bool
    ) -> list[Filling | None]:
        """The filling of each host. None: the version `stays` in its slot there."""
        ranks, manifest = self._ranks, self.buffers.manifest
        if ranks.hosts == 1:
            if self._begun is None or self._begun[0] != endpoint:
                agreed(ranks, lambda: bool(opened()))
            return [first_alone(ranks, lambda: opened().begin(version, manifest))]

        return begin_on_hosts(ranks, opened, version, manifest, stays=stays)

    def _current_digest(self) -> str:
        return self.buffers.digest()

    def _end(
        self, writer: WeightsWriter, version: int, filling: Filling | None, fault: Exception | None
    ) -> Published:
        ranks, began_s = self._overlapped.ranks, time.perf_counter()
        with all_or_none(ranks):  # no rank digests while another rank copies
            if fault is not None:
                raise fault
        written = agreed(ranks, self._digest)
        manifest = self.buffers.manifest
        ended = agreed(ranks, lambda: end_on_host(self._ranks, writer, filling, manifest, written))
        return Published(
            version=version,
            digest=next(filter(None, ended)),
            weights_bytes=self.buffers.weights_bytes,
            stall_s=self._overlapped.release(),
            digest_s=time.perf_counter() - began_s,
        )

    def _digest(self) -> list[NamedBlock]:
        blocks = self.buffers.block_digests()
        self._overlapped.release()
        self._published_digest = digest_of(blocks, self.buffers.manifest[0].dtype)
        return blocks


def _host_copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.device.type == "cpu" and tensor.dtype == dtype and tensor.is_contiguous():
        return tensor
    return torch.empty(tensor.shape, dtype=dtype, device="cpu").copy_(tensor)


# ---------------------------------------------------------------- from a GPU


class DeviceBuffers:
    """This rank's blocks of the weights, as bytes in the published dtype, on the device that trains them.

    Blocks are rounded when their turn comes, so a copy needs room for two buffers (`devices.pinned`).

    Attributes:
        manifest  the places of the whole weights in a slot
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device) -> None:
        dtype_name, self._dtype, self._device = str(dtype).removeprefix("torch."), dtype, device
        self.manifest = lay_out(
            (name, dtype_name, tuple(weight.shape), weight.numel() * dtype.itemsize)
            for name, weight in weights.items()
        )
        self._writer: WeightsWriter | None = None  # the last one, and its slots that are pinned
        self._pinned_slots = set[int]()
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
        if writer is not self._writer:
            self._writer, self._pinned_slots = writer, set()
        if filling.slot not in self._pinned_slots:
            writer.pin(pinned, page_areas(places))
            self._pinned_slots.add(filling.slot)
        copy_from_device(self._device, [owned.block for owned in self._owned], places, self._dtype)

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
