"""Whether the head of a Ray cluster is there. Without the head no worker can start, and Ray ends this process
after a minute, with an error of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

LOOK_S = 1.0
SILENT_S_MAX = 10.0
"""A head that accepts no connection for so long is gone."""
FROZEN_S_MAX = 20.0
"""A head that accepts connections, and answers nothing for so long, is gone too."""
STOPPED_S = 5.0
"""A longer time between two looks means that this process was stopped."""


class HeadWatch:
    """Calls `lost` with the reason, once, from a thread of its own. `ask` sends the head a request and
    waits."""

    def __init__(self, address: str, ask: Callable[[], object], lost: Callable[[str], None]) -> None:
        self._address, self._ask, self._lost = address, ask, lost
        self._closed = threading.Event()
        self._answered_s = time.monotonic()
        self._asking = threading.Thread(target=self._ask_on, name="ask the head", daemon=True)
        self._asking.start()
        threading.Thread(target=self._watch, name="watch the head", daemon=True).start()

    def close(self) -> None:
        """Stop the calls. Waits for a request under way, if the head answers. Idempotent."""
        self._closed.set()
        self._asking.join(LOOK_S)

    def _ask_on(self) -> None:
        while not self._closed.wait(LOOK_S):
            with suppress(Exception):  # no answer
                self._ask()
                self._answered_s = time.monotonic()

    def _watch(self) -> None:
        connected_s = looked_s = time.monotonic()
        while not self._closed.wait(LOOK_S):
            reason = self._refusal()
            now_s = time.monotonic()
            if now_s - looked_s > STOPPED_S:  # the head may have answered
                self._answered_s = connected_s = now_s
            looked_s = now_s
            if reason is None:
                connected_s = now_s
                reason = f"takes connections, but has answered nothing for {FROZEN_S_MAX:.0f} s"
            if now_s - connected_s > SILENT_S_MAX or now_s - self._answered_s > FROZEN_S_MAX:
                if not self._closed.is_set():
                    self._lost(f"the head of the Ray cluster, {self._address}, {reason}")
                return

    def _refusal(self) -> str | None:
        """Why the head accepts no connection. None: it accepts one."""
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), LOOK_S).close()
        except OSError as error:
            return f"takes no connection: {error}"
        return None
