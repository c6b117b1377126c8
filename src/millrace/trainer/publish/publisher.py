"""Publishing: the current weights as bytes, which the ranks of a trainer copy into a relay's slot."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch

from millrace.core.digest import (
    Filling,
    NamedBlock,
    NamedBuffer,
    digest_blocks,
    digest_buffers,
    kind_of,
    lay_out,
    version_digest,
)
from millrace.core.errors import DigestMismatchError
from millrace.core.protocols import WeightsWriter
from millrace.core.types import Endpoint, Published
from millrace.devices.gpu import has_own_memory
from millrace.devices.parallel import each
from millrace.trainer.publish.device_buffers import DeviceBuffers
from millrace.trainer.publish.fillings import begin_on_hosts, end_on_host
from millrace.trainer.publish.overlapped import Overlapped
from millrace.trainer.ranks.blocks import owned_blocks
from millrace.trainer.ranks.mesh import ALONE, Ranks, agreed, all_or_none, first_alone

RECHECK_SHARE = 0.01
"""The share of the time from update to update that digests before updates may take."""


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


class Publisher:
    """Publishes versions of weights that `optimizer` updates. The trainer waits only for the copy of this
    rank's `buffers`.

    The weights are digested during the next step, and once more before the next update. So a weight that
    changed in memory meanwhile is not trained on. If the second digest takes more than 1 % of the time, it
    comes only before every n-th update.

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
        self.buffers, self._ranks = buffers, ranks
        self._overlapped = Overlapped[Published]("await_published", ranks)
        self._begun: tuple[Endpoint, int] | None = None
        self._published_digest = ""  # of the blocks that this rank published last; empty: it has no block
        self._fresh = False  # no update since a version was begun
        self._updates, self._recheck_at, self._checked_s = 0, 1, time.perf_counter()
        optimizer.register_step_pre_hook(lambda *_: self._overlapped.wait_read())
        optimizer.register_step_pre_hook(lambda *_: self._before_update())

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

    def result(self) -> Published:
        """Wait until the version that was begun last is whole in its slot.

        Raises: WeightsError, or any other error that stopped the version, on this rank or another.
        """
        return self._overlapped.result()

    def wait(self) -> None:
        """Wait until no version is being published. An error is not raised here."""
        self._overlapped.wait()

    def refuse_changed(self, version: int) -> None:
        """Raises: DigestMismatchError: the weights changed since they were published as `version`."""
        if not self._overlapped.wait() or self.result().version != version:
            return
        digest = self.buffers.digest()
        if self._published_digest and digest != self._published_digest:
            raise DigestMismatchError(
                f"the trainer's weights of version {version} changed in memory: published with digest "
                f"{self._published_digest}, they have {digest} now.\n"
                "  They are not trained on and not saved: test the memory, then `--resume`"
            )

    def _before_update(self) -> None:
        """Recheck before every n-th update. Every rank makes this call equally often, and decides n alike, by
        the measurements of all ranks."""
        if not self._fresh:
            return
        self._fresh, self._updates = False, self._updates + 1
        if self._updates < self._recheck_at:
            return
        took_s, step_s = zip(*agreed(self._ranks, self._recheck), strict=True)
        self._updates, self._recheck_at = 0, max(1, math.ceil(max(took_s) / (RECHECK_SHARE * min(step_s))))

    def _recheck(self) -> tuple[float, float]:
        """Seconds of the recheck, and seconds from update to update. Raises: as `refuse_changed`."""
        self._overlapped.wait()
        assert self._begun is not None
        began_s = time.perf_counter()
        self.refuse_changed(self._begun[1])
        step_s, self._checked_s = (began_s - self._checked_s) / self._updates, began_s
        return time.perf_counter() - began_s, step_s

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
        self._published_digest = ""
        if blocks:
            dtype, kind = self.buffers.manifest[0].dtype, kind_of(blocks[0][1].digest)
            entries = ((name, dtype, block.shape, block.digest) for name, block in blocks)
            self._published_digest = version_digest(entries, kind)
        return blocks


def _host_copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.device.type == "cpu" and tensor.dtype == dtype and tensor.is_contiguous():
        return tensor
    return torch.empty(tensor.shape, dtype=dtype, device="cpu").copy_(tensor)
