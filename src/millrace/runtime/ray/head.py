"""Whether the head of a Ray cluster is there. Without it no worker can start, and Ray ends this process after
a minute, with words of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

LOOK_S = 1.0
SILENT_S_MAX = 10.0
"""A head that takes no connection for so long is gone."""
FROZEN_S_MAX = 20.0
"""So is one that takes connections, and answers nothing for so long."""


class HeadWatch:
    """Calls `lost` with the reason, once, from a thread of its own. `ask` waits for an answer of the head."""

    def __init__(self, address: str, ask: Callable[[], object], lost: Callable[[str], None]) -> None:
        self._address, self._ask, self._lost = address, ask, lost
        self._closed = threading.Event()
        self._answered_s = time.monotonic()
        self._asking = threading.Thread(target=self._ask_on, name="ask the head", daemon=True)
        self._asking.start()
        threading.Thread(target=self._watch, name="watch the head", daemon=True).start()

    def close(self) -> None:
        """It calls nobody any more. A question under way is waited for, if the head answers. Idempotent."""
        self._closed.set()
        self._asking.join(LOOK_S)

    def _ask_on(self) -> None:
        while not self._closed.wait(LOOK_S):
            with suppress(Exception):  # no answer
                self._ask()
                self._answered_s = time.monotonic()

    def _watch(self) -> None:
        connected_s = time.monotonic()
        while not self._closed.wait(LOOK_S):
            why = self._refused()
            now_s = time.monotonic()
            if why is None:
                connected_s = now_s
                why = f"takes connections, but has answered nothing for {FROZEN_S_MAX:.0f} s"
            if now_s - connected_s > SILENT_S_MAX or now_s - self._answered_s > FROZEN_S_MAX:
                if not self._closed.is_set():
                    self._lost(f"the head of the Ray cluster, {self._address}, {why}")
                return

    def _refused(self) -> str | None:
        """Why it takes no connection."""
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), LOOK_S).close()
        except OSError as error:
            return f"takes no connection: {error}"
        return None
