"""Whether the head of a Ray cluster is there. Without it no worker can start, and Ray ends this process after
a minute, with words of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

LOOK_S = 1.0
SILENT_S_MAX = 10.0
"""A head that takes no connection for so long is gone."""


class HeadWatch:
    """Calls `lost` with the reason, once, from a thread of its own."""

    def __init__(
        self, address: str, lost: Callable[[str], None], *, silent_s_max: float = SILENT_S_MAX
    ) -> None:
        self._address, self._lost, self._silent_s_max = address, lost, silent_s_max
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="watch the head", daemon=True).start()

    def close(self) -> None:
        """It calls nobody any more. Idempotent."""
        self._closed.set()

    def _watch(self) -> None:
        host, _, port = self._address.rpartition(":")
        heard_s = time.monotonic()
        while not self._closed.wait(LOOK_S):
            try:
                socket.create_connection((host.strip("[]"), int(port)), LOOK_S).close()
                heard_s = time.monotonic()
            except OSError as error:
                if time.monotonic() - heard_s > self._silent_s_max and not self._closed.is_set():
                    told = f"the head of the Ray cluster, {self._address}, takes no connection: {error}"
                    self._lost(told)
                    return
