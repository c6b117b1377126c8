"""Methods that vLLM adds to its workers, for an engine whose workers are in other processes.

vLLM sends only plain values between its processes, so arguments and answers are pickled here.
"""

from __future__ import annotations

import pickle

from millrace.core.protocols import WeightsReader
from millrace.engines.vllm.loading import load_version


class MillraceWorker:
    """`worker_extension_cls` of vLLM: its worker inherits these methods. `collective_rpc` calls them."""

    _millrace_reader: tuple[bytes, WeightsReader] | None = None  # vLLM's worker has other names

    def load_published(self, reader: bytes, version: int, digest: str) -> bytes:
        """`loading.load_version` with a pickled `WeightsReader`. Returns: its errors, pickled."""
        return pickle.dumps(load_version(self, self._opened(reader), version, digest))

    def _opened(self, pickled: bytes) -> WeightsReader:
        """The reader of the last load, if it is the same: its memory is mapped and pinned once."""
        if self._millrace_reader is None or self._millrace_reader[0] != pickled:
            if self._millrace_reader is not None:
                self._millrace_reader[1].close()
            self._millrace_reader = pickled, pickle.loads(pickled)
        return self._millrace_reader[1]
