"""A cable between two relays, which a test can cut, hold up or spoil."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

DEADLINE_S = 30.0


class Wire:
    """A cable between two relays. `passed` counts the bytes from the serving side.

    After `limit` of them it is cut, or, if it `holds`, the others wait until `free` is set. `flip`: a bit of
    that byte is changed.
    """

    def __init__(self, to: str, *, limit: int | None = None, holds: bool = False, flip: int | None = None):
        self._to, self._limit, self._holds, self._flip = to, limit, holds, flip
        self.passed, self.free = 0, threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends = [self._listener]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                host, port = self._to.split(":")
                far = socket.create_connection((host, int(port)))
                self._ends += [near, far]
                threading.Thread(target=self._pass, args=(near, far, lambda data: True), daemon=True).start()
                threading.Thread(target=self._pass, args=(far, near, self._served), daemon=True).start()

    def _served(self, data: bytearray) -> bool:
        """Whether these bytes go on."""
        if self._flip is not None and 0 <= self._flip - self.passed < len(data):
            data[self._flip - self.passed] ^= 1
        if self._limit is not None and self.passed + len(data) > self._limit:
            if not self._holds:
                return False
            self.free.wait(DEADLINE_S)
        self.passed += len(data)
        return True

    @staticmethod
    def _pass(source: socket.socket, target: socket.socket, allowed: Callable[[bytearray], bool]) -> None:
        with suppress(OSError):
            while (data := bytearray(source.recv(500))) and allowed(data):
                target.sendall(data)
            for end in (source, target):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.free.set()
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@contextmanager
def wire(to: str, **options) -> Iterator[Wire]:
    made = Wire(to, **options)
    try:
        yield made
    finally:
        made.close()
