"""Methods that vLLM adds to its workers, for an engine whose workers are in other processes.

vLLM sends only plain values between its processes, so arguments and answers are pickled here. They travel
between a replica and its own child process, through sockets that only this user can open.
"""

from __future__ import annotations

import pickle
from typing import Any

from millrace.core.protocols import WeightsReader
from millrace.engines.vllm import loading
from millrace.engines.vllm.draft_repair import repair_sampler
from millrace.engines.vllm.loading import load_base, load_version


class MillraceWorker:
    """`worker_extension_cls` of vLLM: its worker inherits these methods. `collective_rpc` calls them."""

    _millrace_reader: tuple[bytes, WeightsReader] | None = None  # vLLM's worker has other names

    def load_published(self, reader: bytes, version: int, digest: str) -> bytes:
        """`loading.load_version` with a pickled `WeightsReader`. Returns: its errors, pickled."""
        return packed(load_version(self, self._opened(reader), version, digest))

    def load_base(self, base: bytes) -> bytes:
        """`loading.load_base` with its pickled arguments. Returns: its errors, pickled."""
        return packed(load_base(self, *unpacked(base)))

    def repair_sampler(self) -> None:
        repair_sampler(self)

    def release_memory(self) -> None:
        loading.release(self)

    def take_memory(self) -> None:
        loading.take_again(self)

    def _opened(self, pickled: bytes) -> WeightsReader:
        """The reader of the last load, if it is the same: its memory is mapped and pinned once."""
        if self._millrace_reader is None or self._millrace_reader[0] != pickled:
            if self._millrace_reader is not None:
                self._millrace_reader[1].close()
            self._millrace_reader = pickled, unpacked(pickled)
        return self._millrace_reader[1]


def packed(value: object) -> bytes:
    return pickle.dumps(value)


def unpacked(data: bytes) -> Any:
    """What the other process packed."""
    return pickle.loads(data)
