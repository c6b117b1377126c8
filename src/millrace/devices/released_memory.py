"""Memory that tensors give back while nobody computes with them. The tensors stay: only their numbers go.

On a CPU the kernel takes the whole pages of a tensor. Addresses stay the same, so views and code that knows
an address go on afterwards. Numbers that are kept are in a file without a name meanwhile, and nothing remains
of that file, whoever dies. On a device torch's allocator gives back the memory, and numbers that are kept are
in the memory of the host.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import torch

from millrace.core.errors import StorageError, writing
from millrace.core.progress import count
from millrace.devices.gpu import has_own_memory
from millrace.devices.large_memory import Bytes, each, give_back, trim

PART_BYTES = 64 << 20  # written or read at a time: a count of progress each


class ReleasedMemory:
    """The memory of `kept` and of `forgotten` is free from now on, until `take_again`.

    Tensors of less than a page stay. A tensor may be in both lists: then it is kept.

    Args:
        device_type: of the device that computes. Other tensors stay: a GPU may know the pages of those on the
            host by their physical address.
        directory: of the file with the numbers of `kept` tensors on a CPU.
    Raises: StorageError: the file cannot be written. Then no memory was given back.
    """

    def __init__(
        self,
        forgotten: Iterable[torch.Tensor],
        kept: Iterable[torch.Tensor] = (),
        *,
        device_type: str = "cpu",
        directory: Path | None = None,
    ) -> None:
        keep, forget = _storages(kept, device_type), _storages(forgotten, device_type)
        self._pages = [pages for storage in keep.values() if (pages := _whole_pages(storage)) is not None]
        self._file = _written(self._pages, directory) if self._pages else None
        device = {address: storage for address, storage in (forget | keep).items() if _is_apart(storage)}
        self._on_host = [(storage, _bytes(storage).cpu()) for a, storage in keep.items() if a in device]
        self._sizes = [(storage, storage.nbytes()) for storage in device.values()]
        for storage in (forget | keep).values():
            if (pages := _whole_pages(storage)) is not None:
                give_back(pages)
        for storage, _ in self._sizes:
            storage.resize_(0)
        if self._sizes:
            torch.cuda.empty_cache()
        trim()

    def take_again(self) -> None:
        """The numbers of `kept` tensors are as before, those of `forgotten` tensors are 0. A repeat after an
        error begins anew.

        Raises: StorageError: the file cannot be read.
        """
        for storage, num_bytes in self._sizes:
            if storage.nbytes() != num_bytes:
                storage.resize_(num_bytes)
                _bytes(storage).zero_()
        for storage, numbers in self._on_host:
            _bytes(storage).copy_(numbers)
        if self._file is not None:
            parts = list(_parts(self._pages))
            each(self._read, zip(accumulate(map(len, parts), initial=0), parts, strict=False))
            self._file.close()
            self._file, self._pages = None, []
        self._on_host, self._sizes = [], []

    def _read(self, place: tuple[int, Bytes]) -> None:
        """A part of the file, from its first byte on. Fresh pages take longer than the copy, so several
        threads read."""
        assert self._file is not None
        offset, part = place
        if os.preadv(self._file.fileno(), [part.data], offset) != len(part):
            raise StorageError("the file with the numbers of tensors that slept is too short")
        count(len(part))


def _storages(tensors: Iterable[torch.Tensor], device_type: str) -> dict[int, Any]:
    """The storages of `tensors` by address: several tensors may share one."""
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == device_type)
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def _is_apart(storage: Any) -> bool:
    return has_own_memory(storage.device)


def _bytes(storage: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _whole_pages(storage: Any) -> Bytes | None:
    """None: there is no whole page, or the storage is on a device."""
    if _is_apart(storage):
        return None
    start = -storage.data_ptr() % mmap.PAGESIZE
    end = storage.nbytes() - (storage.data_ptr() + storage.nbytes()) % mmap.PAGESIZE
    return _bytes(storage).numpy()[start:end] if start < end else None


def _parts(pages: Iterable[Bytes]) -> Iterator[Bytes]:
    for memory in pages:
        for start in range(0, len(memory), PART_BYTES):
            yield memory[start : start + PART_BYTES]


def _written(pages: Iterable[Bytes], directory: Path | None) -> BinaryIO:
    with writing(directory):
        file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
        for part in _parts(pages):
            file.write(part.data)
            count(len(part))
        file.flush()
    return file
