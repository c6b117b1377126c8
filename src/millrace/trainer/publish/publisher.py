"""The current weights as bytes, and how the ranks of a trainer bring them into a relay's slot."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain

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
from millrace.trainer.publish.device_buffers import DeviceBuffers
from millrace.trainer.publish.overlapped import Overlapped
from millrace.trainer.ranks.blocks import owned_blocks
from millrace.trainer.ranks.mesh import ALONE, Ranks, agreed, all_or_none, first_alone

RECHECK_SHARE = 0.01
"""Of the time from update to update that digests before them take."""


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
        self._owned = [(part, _host_copy(part.block, dtype)) for part in owned_blocks(weights)]
        self.blocks = [
            NamedBuffer(
                part.name,
                told,
                tuple(host.shape),
                host.view(-1).view(torch.uint8).numpy(),
                None if host.shape == part.shape else part.start,
            )
            for part, host in self._owned
        ]

    @property
    def weights_bytes(self) -> int:
        """Of one version, whoever holds it: what a slot must have. Manifests have room of their own."""
        return sum(spec.num_bytes for spec in self.manifest)

    def fill(self) -> list[NamedBuffer]:
        """The blocks of the current weights. They stay valid until the next step."""
        for part, host in self._owned:
            if part.block.data_ptr() != host.data_ptr():
                host.copy_(part.block)
        return self.blocks

    def copy(self, writer: WeightsWriter, filling: Filling) -> None:
        """The current weights, into the slot of `filling`."""
        writer.fill(filling, self.manifest, self.fill())

    def block_digests(self) -> list[NamedBlock]:
        """What was copied, with digests taken of the buffers, not of the copy."""
        return digest_blocks(self.blocks)

    def digest(self) -> str:
        """Of this rank's parts of the current weights."""
        return digest_buffers(self.fill())


def buffers_of(weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> PublishBuffers | DeviceBuffers:
    """How this rank's parts are published: by the device that holds all of them, else by the host."""
    devices = {part.block.device for part in owned_blocks(weights)}
    if len(devices) == 1 and has_own_memory(device := devices.pop()):
        return DeviceBuffers(weights, dtype, device)
    return PublishBuffers(weights, dtype)


class Publisher:
    """Publishes versions of weights that `optimizer` updates. The trainer waits for the copy alone: of this
    rank's `buffers` and no others'.

    Their digest is taken beside the next step, and once more before the next update: a weight that changed in
    memory meanwhile is not trained on. Where this would take more than 1 % of the time, it is done before
    every n-th update.

    Only digests go from rank to rank. The first rank of each host begins a version in a slot there, and ends
    it after all. Where one rank fails all fail, so that none waits for another.
    """

    def __init__(
        self,
        buffers: PublishBuffers | DeviceBuffers,
        optimizer: torch.optim.Optimizer,
        ranks: Ranks = ALONE,
    ) -> None:
        self.buffers, self._ranks = buffers, ranks
        self._beside = Overlapped[Published](optimizer, ranks, "publish")
        self._begun: tuple[Endpoint, int] | None = None
        self._held = ""  # the digest of what this rank published last; empty: it held nothing
        self._fresh = False  # no update since a version was begun
        self._updates, self._recheck_at, self._checked_s = 0, 1, time.perf_counter()
        optimizer.register_step_pre_hook(lambda *_: self._before_update())

    def begin(self, opened: Callable[[], WeightsWriter], endpoint: Endpoint, version: int) -> None:
        """Copy the weights into a slot of `endpoint`, the relay's here, of which `opened` gives the writer.
        They may be trained on at once. A repeat writes nothing: it would cost the readers a slot. Where only
        other hosts have another endpoint, what was written here stays."""
        began_s, ranks = time.perf_counter(), self._ranks
        stays = self._beside.wait() and self._begun == (endpoint, version)
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
            fault = error  # raised where all ranks learn of it
        self._beside.begin(partial(self._end, writer, version, filling, fault), began_s)

    def _fillings(
        self, opened: Callable[[], WeightsWriter], endpoint: Endpoint, version: int, *, stays: bool
    ) -> list[Filling | None]:
        """Of each host. None: what was written there `stays`."""
        ranks, manifest = self._ranks, self.buffers.manifest
        if ranks.hosts == 1:
            if self._begun is None or self._begun[0] != endpoint:
                agreed(ranks, lambda: bool(opened()))
            return [first_alone(ranks, lambda: opened().begin(version, manifest))]

        def begin() -> Filling | None:
            writer = opened()
            return writer.begin(version, manifest) if ranks.rank == ranks.leader and not stays else None

        return agreed(ranks, begin)[:: ranks.world // ranks.hosts]

    def result(self) -> Published:
        """Wait until the version that was begun last is whole in its slot.

        Raises: WeightsError, and whatever else kept it from being whole, here or on another rank.
        """
        return self._beside.result()

    def wait(self) -> None:
        """Until none is under way, however it ended."""
        self._beside.wait()

    def refuse_changed(self, version: int) -> None:
        """Raises: DigestMismatchError: the weights changed since they were published as `version`."""
        if not self._beside.wait() or self.result().version != version:
            return
        found = self.buffers.digest()
        if self._held and found != self._held:
            raise DigestMismatchError(
                f"the trainer's weights of version {version} changed in memory: published with digest "
                f"{self._held}, they have {found} now.\n"
                "  They are not trained on and not saved: test the memory, then `--resume`"
            )

    def _before_update(self) -> None:
        """Every rank comes here equally often, and decides alike: by what all of them measured."""
        if not self._fresh:
            return
        self._fresh, self._updates = False, self._updates + 1
        if self._updates < self._recheck_at:
            return
        took_s, step_s = zip(*agreed(self._ranks, self._recheck), strict=True)
        self._updates, self._recheck_at = 0, max(1, math.ceil(max(took_s) / (RECHECK_SHARE * min(step_s))))

    def _recheck(self) -> tuple[float, float]:
        """Seconds that it took, and from update to update. Raises: as `refuse_changed`."""
        self._beside.wait()
        assert self._begun is not None
        began_s = time.perf_counter()
        self.refuse_changed(self._begun[1])
        step_s, self._checked_s = (began_s - self._checked_s) / self._updates, began_s
        return time.perf_counter() - began_s, step_s

    def _end(
        self, writer: WeightsWriter, version: int, filling: Filling | None, fault: Exception | None
    ) -> Published:
        ranks, began_s = self._beside.ranks, time.perf_counter()
        with all_or_none(ranks):  # nobody digests while another copies
            if fault is not None:
                raise fault
        written = agreed(ranks, self._digest)
        ended = agreed(ranks, lambda: self._ended(writer, filling, written))
        return Published(
            version=version,
            digest=next(filter(None, ended)),
            weights_bytes=self.buffers.weights_bytes,
            stall_s=self._beside.release(),
            digest_s=time.perf_counter() - began_s,
        )

    def _ended(
        self, writer: WeightsWriter, filling: Filling | None, written: Sequence[Sequence[NamedBlock]]
    ) -> str:
        """The version's digest, where this rank ends it; `written`: by each rank."""
        ranks, every = self._ranks, chain.from_iterable
        if filling is None or ranks.rank != ranks.leader:
            return ""
        here = slice(ranks.leader, ranks.leader + ranks.world // ranks.hosts)
        elsewhere = [*written[: here.start], *written[here.stop :]]
        return writer.end(filling, self.buffers.manifest, every(written[here]), every(elsewhere))

    def _digest(self) -> list[NamedBlock]:
        pieces = self.buffers.block_digests()
        self._beside.release()
        self._held = ""
        if pieces:
            dtype, kind = self.buffers.manifest[0].dtype, kind_of(pieces[0][1].digest)
            self._held = version_digest(((name, dtype, p.shape, p.digest) for name, p in pieces), kind)
        return pieces


def _host_copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.device.type == "cpu" and tensor.dtype == dtype and tensor.is_contiguous():
        return tensor
    return torch.empty(tensor.shape, dtype=dtype, device="cpu").copy_(tensor)
