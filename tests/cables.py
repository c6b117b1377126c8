"""A cable between two relays, which a test can cut, hold up or spoil; and a stranger between two relays.

python tests/cables.py 10.77.0.2:4000 10.77.0.1:5000    # a stranger there passes connections on
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from unittest.mock import patch

from millrace.weights.chain import wire as chain

DEADLINE_S = 120.0
CABLES = "127.64."
"""Where cables listen; the rest of the address is the port of the relay."""


class Wire:
    """Listens, and passes on to `to` all that is said. `passed` counts the bytes from the serving side.

    After `limit` of them it is cut, or, if it `holds`, the others wait until `free` is set. With `pause_s`
    each 500 of the others take so long. `flip`: a bit of that byte is changed.
    """

    def __init__(
        self,
        to: str,
        *,
        at: str = "127.0.0.1:0",
        limit: int | None = None,
        holds: bool = False,
        pause_s: float = 0.0,
        flip: int | None = None,
    ) -> None:
        self._to, self._limit, self._holds, self._flip = to, limit, holds, flip
        self._pause_s = pause_s
        self.passed, self.free = 0, threading.Event()
        host, port = at.split(":")
        self._listener = socket.create_server((host, int(port)))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
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
            if not self._holds and not self._pause_s:
                return False
            self.free.wait(self._pause_s or DEADLINE_S)
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
def stranger(to: str) -> Iterator[Wire]:
    """Listens at an address of its own, and passes on all that is said."""
    made = Wire(to)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def wire(to: str, **options) -> Iterator[Wire]:
    """A cable: who connects to it believes to be at the relay `to`, on this host."""
    high, low = divmod(int(to.rpartition(":")[2]), 256)
    made = Wire(to, at=f"{CABLES}{high}.{low}:0", **options)
    try:
        with believed():
            yield made
    finally:
        made.close()


@contextmanager
def believed() -> Iterator[None]:
    """In this process a cable's address stands for that of its relay: proofs would not pass a cable."""
    proof = chain._proof

    def of_the_relay(secret: str, side: str, challenges: bytes, accepting: bytes, connecting: bytes) -> bytes:
        if accepting.startswith(CABLES.encode()):
            high, low = accepting.decode().partition(":")[0].split(".")[2:]
            accepting = f"127.0.0.1:{256 * int(high) + int(low)}".encode()
        return proof(secret, side, challenges, accepting, connecting)

    with patch.object(chain, "_proof", of_the_relay):
        yield


if __name__ == "__main__":
    there = Wire(sys.argv[2], at=sys.argv[1])
    print("listens", flush=True)
    sys.stdin.read()
    print(there.passed, flush=True)
