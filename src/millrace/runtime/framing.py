"""Messages between the controller and one worker: a header and a pickle, over a socketpair.

Threat model: both ends are processes of one run of one user, and the socketpair has no name, so nobody
else can write to it. That is what makes pickle acceptable here; nothing read from a file or a network
may come this way.

    header | pickle | buffers | sizes of the buffers

Large buffers of a message travel beside its pickle, without a copy (PEP 574): they must not change until the
message is sent. A message is written a piece at a time, and the loop turns between two pieces. So a batch of
gigabytes delays only later messages to the same worker. The header is readable without the payload, so a
payload that cannot be unpickled is the error of its own call only. Outgoing bytes are held in memory until
the other side reads: callers bound their calls, a window bounds a stream.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Any

_HEADER = struct.Struct("!QIBQQ")  # payload bytes, buffers, kind, epoch, call id
PIECE_BYTES = 1 << 18
"""Read or written at once."""
BESIDE_BYTES = 1 << 10
"""Buffers of at least this size are not copied into the pickle."""


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


class Payload:
    """A message's value, still pickled."""

    def __init__(self, body: bytes | bytearray, num_buffers: int) -> None:
        self._body, self._num_buffers = memoryview(body), num_buffers

    def value(self) -> Any:
        """Raises what unpickling raises."""
        sizes_at = len(self._body) - 8 * self._num_buffers
        sizes = struct.unpack_from(f"!{self._num_buffers}Q", self._body, sizes_at)
        start = sizes_at - sum(sizes)
        pickled, buffers = self._body[:start], []
        for size in sizes:
            buffers.append(self._body[start : start + size])
            start += size
        return pickle.loads(pickled, buffers=buffers)


Receive = Callable[[Kind, int, int, Payload], None]


class Framing(asyncio.BufferedProtocol):
    """One end. `receive(kind, epoch, call_id, payload)` is called for each message, in order."""

    def __init__(self, receive: Receive, lost: Callable[[], None]) -> None:
        self._receive, self._lost = receive, lost
        self._transport: asyncio.Transport | None = None
        self._outgoing: deque[memoryview] = deque()
        self._paused = False
        self._arriving = bytearray(PIECE_BYTES)  # beginnings of messages
        self._arrived = 0
        self._large: tuple[Kind, int, int, int, bytearray] | None = None  # one that has more than fits there

    # ------------------------------------------------------------ out

    def send(self, kind: Kind, epoch: int, call_id: int, value: Any) -> None:
        """Send one message. Raises what pickling `value` raises; then nothing was sent."""
        beside: list[memoryview] = []

        def inside(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes >= BESIDE_BYTES:
                beside.append(raw)
            return raw.nbytes < BESIDE_BYTES

        pickled = pickle.dumps(value, protocol=5, buffer_callback=inside)
        sizes = struct.pack(f"!{len(beside)}Q", *(raw.nbytes for raw in beside))
        num_bytes = len(pickled) + len(sizes) + sum(raw.nbytes for raw in beside)
        head = _HEADER.pack(num_bytes, len(beside), kind, epoch, call_id) + pickled
        if self._transport is None:
            return
        idle = not self._outgoing
        self._outgoing.append(memoryview(head))
        if beside:
            self._outgoing.extend((*beside, memoryview(sizes)))
        if idle:
            self._write()

    def _write(self) -> None:
        """One piece; the next when the loop has turned, or when the other side has read."""
        if self._transport is None or self._paused or not self._outgoing:
            return
        self._transport.write(self._next_piece())
        if self._outgoing and not self._paused:
            asyncio.get_running_loop().call_soon(self._write)

    def _next_piece(self) -> bytes | memoryview:
        parts, num_bytes = [], 0
        while self._outgoing and num_bytes < PIECE_BYTES:
            part, room = self._outgoing.popleft(), PIECE_BYTES - num_bytes
            if len(part) > room:
                self._outgoing.appendleft(part[room:])
                part = part[:room]
            parts.append(part)
            num_bytes += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._write()

    def close(self) -> None:
        self._outgoing.clear()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._outgoing.clear()
        self._lost()

    # ------------------------------------------------------------ in

    def get_buffer(self, sizehint: int) -> memoryview:
        into = self._arriving if self._large is None else self._large[4]
        return memoryview(into)[self._arrived :]

    def buffer_updated(self, num_bytes: int) -> None:
        self._arrived += num_bytes
        if self._large is None:
            self._take_messages()
        elif self._arrived == len(self._large[4]):
            kind, epoch, call_id, num_buffers, body = self._large
            self._large, self._arrived = None, 0
            self._receive(kind, epoch, call_id, Payload(body, num_buffers))

    def _take_messages(self) -> None:
        start, arrived = 0, memoryview(self._arriving)[: self._arrived]
        while len(arrived) - start >= _HEADER.size:
            num_bytes, num_buffers, kind, epoch, call_id = _HEADER.unpack_from(arrived, start)
            begin, end = start + _HEADER.size, start + _HEADER.size + num_bytes
            if end > len(arrived):
                if _HEADER.size + num_bytes > PIECE_BYTES:
                    return self._begin_large(Kind(kind), epoch, call_id, num_buffers, num_bytes, begin)
                break
            start = end
            self._receive(Kind(kind), epoch, call_id, Payload(bytes(arrived[begin:end]), num_buffers))
        self._arrived = len(arrived) - start
        self._arriving[: self._arrived] = bytes(arrived[start:])

    def _begin_large(
        self, kind: Kind, epoch: int, call_id: int, num_buffers: int, num_bytes: int, begin: int
    ) -> None:
        """The rest of this message is read to where it stays."""
        body, here = bytearray(num_bytes), self._arrived - begin
        body[:here] = memoryview(self._arriving)[begin : self._arrived]
        self._large, self._arrived = (kind, epoch, call_id, num_buffers, body), here
