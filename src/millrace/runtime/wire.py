"""Messages between the controller and one worker: a header and a pickle, over a socketpair.

Threat model: both ends are processes of one run of one user, and the socketpair has no name, so nobody
else can write to it. That is what makes pickle acceptable here; nothing read from a file or a network
may come this way.

The header (length, kind, epoch, call id) is readable without the payload, so a payload that cannot
be unpickled is the error of its own call and of no other. Outgoing bytes are held in memory until
the other side reads: calls are bounded by their callers, streams by their window.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Any

_HEADER = struct.Struct("!QBQQ")  # payload bytes, kind, epoch, call id


class Kind(IntEnum):
    # controller to worker
    CONSTRUCT = 1  # (target, kwargs): make the object; answered like a call
    CALL = 2  # (method, args)
    STREAM = 3  # (method, args, window): an ITEM needs one of `window` credits
    CREDIT = 4  # how many more items may be sent
    CANCEL = 5  # None: close the stream's generator
    # worker to controller
    RESULT = 6  # what the call returned
    ITEM = 7  # the next item of the stream
    END = 8  # None: the stream is complete
    ERROR = 9  # a MillraceError: ends the call or the stream


Receive = Callable[[Kind, int, int, bytes], None]


class Wire(asyncio.Protocol):
    """One end. `receive(kind, epoch, call_id, payload)` is called for each message, in order."""

    def __init__(self, receive: Receive, lost: Callable[[], None]) -> None:
        self._receive, self._lost = receive, lost
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def send(self, kind: Kind, epoch: int, call_id: int, value: Any) -> None:
        """Send one message. Raises what pickling `value` raises; then nothing was sent."""
        payload = pickle.dumps(value, protocol=5)
        if self._transport is not None:
            self._transport.writelines((_HEADER.pack(len(payload), kind, epoch, call_id), payload))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._lost()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        start, available = 0, len(self._buffer)
        while available - start >= _HEADER.size:
            num_bytes, kind, epoch, call_id = _HEADER.unpack_from(self._buffer, start)
            end = start + _HEADER.size + num_bytes
            if available < end:
                break
            payload = bytes(memoryview(self._buffer)[start + _HEADER.size : end])
            start = end
            self._receive(Kind(kind), epoch, call_id, payload)
        del self._buffer[:start]
