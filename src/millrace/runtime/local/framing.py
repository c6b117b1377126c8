"""Messages between the controller and one worker: a header and a pickle, over a socketpair.

Threat model: both ends are processes of one run of one user. The socketpair has no name, so nobody else can
write to it. So pickle is acceptable here. Nothing read from a file or a network may come this way.

    header | pickle | buffers | sizes of the buffers

Large buffers of a message travel out of band, without a copy (PEP 574). They must not change until the
message is sent. A message larger than one write is a header alone, then fragments with headers of their own.
The loop turns between two writes. An urgent message (a ping, its answer) goes before the next fragment. So a
batch of gigabytes delays later calls of the same worker, and never its heartbeat.

The header is readable without the payload, so a payload that cannot be unpickled is the error of its own call
only. Outgoing bytes stay in memory until the receiver reads them. Callers bound their calls, and a window
bounds a stream.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

_HEADER = struct.Struct("!QIBQQ")  # payload bytes, buffers, kind, epoch, call id
WRITE_BYTES = 1 << 18
"""Read or written at once, header included."""
FRAGMENT_BYTES = WRITE_BYTES - _HEADER.size
"""A larger payload travels in fragments."""
OUT_OF_BAND_BYTES = 1 << 10
"""Buffers of at least this size are not copied into the pickle."""


class Kind(IntEnum):
    # controller to worker
    CONSTRUCT = 1  # (target, kwargs): make the object; answered like a call
    CALL = 2  # (method, args)
    STREAM = 3  # (method, args, window): each ITEM takes one of `window` credits
    CREDIT = 4  # how many more items may be sent
    CANCEL = 5  # None: close the stream's generator
    # either way
    FRAGMENT = 0  # the next bytes of the large message whose header came last
    # worker to controller
    RESULT = 6  # what the call returned
    ITEM = 7  # the next item of the stream
    END = 8  # None: the stream is complete
    ERROR = 9  # a MillraceError: ends the call or the stream


_KINDS = sorted(Kind)


class Payload:
    """A message's value, still pickled."""

    def __init__(self, body: bytes | bytearray, num_buffers: int) -> None:
        self._body, self._num_buffers = memoryview(body), num_buffers

    def value(self) -> Any:
        """Raises what unpickling raises."""
        if not self._num_buffers:
            return pickle.loads(self._body)
        sizes_at = len(self._body) - 8 * self._num_buffers
        sizes = struct.unpack_from(f"!{self._num_buffers}Q", self._body, sizes_at)
        start = sizes_at - sum(sizes)
        pickled, buffers = self._body[:start], []
        for size in sizes:
            buffers.append(self._body[start : start + size])
            start += size
        return pickle.loads(pickled, buffers=buffers)


Receive = Callable[[Kind, int, int, Payload], None]


class _Outgoing:
    """A large message on its way out: its bytes that are not sent yet."""

    def __init__(self, epoch: int, call_id: int, views: list[memoryview]) -> None:
        self._epoch, self._call_id, self._views = epoch, call_id, deque(views)

    def take(self, room: int) -> list[bytes | memoryview]:
        """The next fragment, of at most `room` bytes of payload: its header, then its bytes."""
        taken: list[bytes | memoryview] = []
        num_bytes = 0
        while self._views and num_bytes < room:
            view = self._views.popleft()
            if len(view) > room - num_bytes:
                self._views.appendleft(view[room - num_bytes :])
                view = view[: room - num_bytes]
            taken.append(view)
            num_bytes += len(view)
        return [_HEADER.pack(num_bytes, 0, Kind.FRAGMENT, self._epoch, self._call_id), *taken]

    def __bool__(self) -> bool:
        return bool(self._views)


@dataclass(slots=True)
class _Arriving:
    """A large message on its way in."""

    kind: Kind
    epoch: int
    call_id: int
    num_buffers: int
    body: bytearray
    num_filled: int = 0
    fragment_left: int = 0  # bytes of the current fragment that have not come


class Framing(asyncio.BufferedProtocol):
    """One end. It calls `receive(kind, epoch, call_id, payload)` for each message. Messages arrive in the
    order of their sending, except urgent messages."""

    def __init__(self, receive: Receive, lost: Callable[[], None]) -> None:
        self._receive, self._lost = receive, lost
        self._transport: asyncio.Transport | None = None
        self._urgent: deque[bytes] = deque()
        self._outgoing: deque[bytes | _Outgoing] = deque()
        self._paused = False
        self._buffer = bytearray(WRITE_BYTES)  # bytes that arrived of messages that fit into it
        self._arrived = 0
        self._large: _Arriving | None = None

    # ------------------------------------------------------------ out

    def send(self, kind: Kind, epoch: int, call_id: int, value: Any, *, urgent: bool = False) -> None:
        """Send one message. An `urgent` message is small and overtakes others. Raises what pickling `value`
        raises; then nothing was sent."""
        out_of_band: list[memoryview] = []

        def in_band(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes >= OUT_OF_BAND_BYTES:
                out_of_band.append(raw)
            return raw.nbytes < OUT_OF_BAND_BYTES

        pickled = pickle.dumps(value, protocol=5, buffer_callback=in_band)
        payload: list[bytes | memoryview] = [pickled]
        if out_of_band:
            sizes = struct.pack(f"!{len(out_of_band)}Q", *(raw.nbytes for raw in out_of_band))
            payload += (*out_of_band, sizes)
        num_bytes = sum(map(len, payload))
        header = _HEADER.pack(num_bytes, len(out_of_band), kind, epoch, call_id)
        if self._transport is None:
            return
        idle = not (self._urgent or self._outgoing)
        if num_bytes > FRAGMENT_BYTES:
            self._outgoing.extend((header, _Outgoing(epoch, call_id, [memoryview(view) for view in payload])))
        elif idle and not self._paused:
            return self._transport.writelines([b"".join((header, *payload))])
        else:
            (self._urgent if urgent else self._outgoing).append(b"".join((header, *payload)))
        if idle:
            self._write()

    def _write(self) -> None:
        """Write once; again when the loop has turned, or when the receiver has read."""
        if self._transport is None or self._paused or not (self._urgent or self._outgoing):
            return
        self._transport.writelines(self._next_write())
        if (self._urgent or self._outgoing) and not self._paused:
            asyncio.get_running_loop().call_soon(self._write)

    def _next_write(self) -> list[bytes | memoryview]:
        """At least one message or fragment, at most about 2 * WRITE_BYTES."""
        views: list[bytes | memoryview] = [*self._urgent]
        self._urgent.clear()
        num_bytes = sum(map(len, views))
        while self._outgoing and num_bytes < WRITE_BYTES:
            first = self._outgoing[0]
            if isinstance(first, bytes):
                added: list[bytes | memoryview] = [first]
                self._outgoing.popleft()
            else:
                added = first.take(FRAGMENT_BYTES)
                if not first:
                    self._outgoing.popleft()
            views += added
            num_bytes += sum(map(len, added))
        return views

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._write()

    def close(self) -> None:
        self._forget_outgoing()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._forget_outgoing()
        self._lost()

    def _forget_outgoing(self) -> None:
        self._urgent.clear()
        self._outgoing.clear()

    # ------------------------------------------------------------ in

    @property
    def receiving(self) -> bool:
        """Whether a large message has begun to come and is not complete."""
        return self._large is not None

    def get_buffer(self, sizehint: int) -> memoryview:
        large = self._large
        if large is not None and large.fragment_left:  # read without a later copy
            return memoryview(large.body)[large.num_filled : large.num_filled + large.fragment_left]
        return memoryview(self._buffer)[self._arrived :]

    def buffer_updated(self, num_bytes: int) -> None:
        large = self._large
        if large is not None and large.fragment_left:
            large.fragment_left -= num_bytes
            self._fill(large, num_bytes)
        else:
            self._arrived += num_bytes
            self._take_messages()

    def _take_messages(self) -> None:
        start, arrived = 0, memoryview(self._buffer)[: self._arrived]
        while len(arrived) - start >= _HEADER.size:
            num_bytes, num_buffers, kind, epoch, call_id = _HEADER.unpack_from(arrived, start)
            begin, end = start + _HEADER.size, start + _HEADER.size + num_bytes
            if kind == Kind.FRAGMENT:
                start = min(end, len(arrived))
                self._take_fragment(arrived[begin:start], num_bytes)
            elif num_bytes > FRAGMENT_BYTES:
                self._large = _Arriving(_KINDS[kind], epoch, call_id, num_buffers, bytearray(num_bytes))
                start = begin
            elif end > len(arrived):
                break
            else:
                start = end
                self._receive(_KINDS[kind], epoch, call_id, Payload(bytes(arrived[begin:end]), num_buffers))
        self._arrived = len(arrived) - start
        self._buffer[: self._arrived] = bytes(arrived[start:])

    def _take_fragment(self, here: memoryview, num_bytes: int) -> None:
        large = self._large
        assert large is not None, "a fragment of no message"
        large.body[large.num_filled : large.num_filled + len(here)] = here
        large.fragment_left = num_bytes - len(here)
        self._fill(large, len(here))

    def _fill(self, large: _Arriving, num_bytes: int) -> None:
        large.num_filled += num_bytes
        if large.num_filled == len(large.body):
            self._large = None
            payload = Payload(large.body, large.num_buffers)
            self._receive(large.kind, large.epoch, large.call_id, payload)
