"""A copy of a checkpoint's blocks in memory, so that no update waits for the disk.

A copy takes a tenth of the time of a write. It is made during the forward passes of the next step, of a state
of `COPIED_BYTES_MIN` or more, where the host has room for it. A CPU computes a step for longer than it writes
the state: there is no copy.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Collection
from dataclasses import replace
from threading import Thread

import torch

from millrace.core.progress import count
from millrace.devices.inventory import read_memory
from millrace.devices.pages import allocate
from millrace.devices.parallel import each
from millrace.trainer.ranks.blocks import OwnedBlock
from millrace.trainer.ranks.mesh import Ranks

LOG = logging.getLogger(__name__)
COPIED_BYTES_MIN = 10**9  # of a rank; a smaller state is written to the page cache during a step
COPIED_FROM = {"cuda"}  # devices of the trainer
FREE_SHARE = 0.5  # of the host's free memory, for the copies of all ranks
ALIGNMENT = 64


class Snapshot:
    """Memory that is kept from checkpoint to checkpoint, because fresh pages take ten times as long."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks_here, self._offload = ranks.world // ranks.hosts, ranks.offload
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._refused = False
        self._reserving = Thread()

    def reserve(self, blocks: Collection[OwnedBlock], more_bytes: int) -> None:
        """Allocate the memory of `blocks`, and `more_bytes`, in a thread, before the first checkpoint needs
        it."""
        num_bytes = sum(owned.block.nbytes for owned in blocks) + more_bytes
        if self._copies(blocks, num_bytes):
            self._reserving = Thread(target=self._has, args=(num_bytes,), name="snapshot", daemon=True)
            self._reserving.start()

    def forget(self) -> None:
        """Give the memory back, until `reserve` or `of` needs memory again."""
        if self._reserving.ident is not None:
            self._reserving.join()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def of(self, blocks: Collection[OwnedBlock]) -> list[OwnedBlock] | None:
        """Copies of `blocks`, which stay until the next call. None: the state is small, or a CPU's, or the
        host has no room."""
        places, num_bytes = list[slice](), 0
        for owned in blocks:
            places.append(slice(num_bytes, num_bytes + owned.block.nbytes))
            num_bytes += -(-owned.block.nbytes // ALIGNMENT) * ALIGNMENT
        if self._reserving.ident is not None:
            self._reserving.join()
        if not self._copies(blocks, num_bytes) or not self._has(num_bytes):
            return None
        memory, on_gpu = self._memory, any(owned.block.is_cuda for owned in blocks)

        def copy(block_and_place: tuple[OwnedBlock, slice]) -> OwnedBlock:
            owned, place = block_and_place
            copied = memory[place].view(owned.block.dtype).view(owned.block.shape)
            with torch.no_grad():
                copied.copy_(owned.block)
            count(owned.block.nbytes)
            return replace(owned, block=copied)

        pairs = zip(blocks, places, strict=True)
        if not on_gpu:
            return each(copy, pairs, threads_min=2)
        with torch.cuda.stream(torch.cuda.Stream()):  # beside what the next step computes
            return [copy(pair) for pair in pairs]

    def _copies(self, blocks: Collection[OwnedBlock], num_bytes: int) -> bool:
        devices = {"cuda"} if self._offload else {owned.block.device.type for owned in blocks}
        return num_bytes >= COPIED_BYTES_MIN and not devices.isdisjoint(COPIED_FROM)

    def _has(self, num_bytes: int) -> bool:
        """Whether the memory is there. The first time it is allocated."""
        if len(self._memory) >= num_bytes:
            return True
        _, free_bytes = read_memory()
        if num_bytes * self._ranks_here > FREE_SHARE * free_bytes:
            if not self._refused:
                LOG.warning(
                    "a checkpoint of %.1f GB has no room for a copy in memory (%.1f GB are free, and half of "
                    "them may be taken): the first update after a checkpoint waits until its files are "
                    "written. A larger `checkpoints.every` makes that rarer",
                    num_bytes * self._ranks_here / 1e9,
                    free_bytes / 1e9,
                )
            self._refused = True
            return False
        self._memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        allocate(self._memory.numpy())
        return True
