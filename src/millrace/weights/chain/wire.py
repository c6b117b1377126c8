"""Links between relays: frames over TCP, after both relays have proved that they know the run's secret.

    frame    4 bytes length, then a message in msgpack; after a `Chunk` its bytes and a `ChunkChecksum` follow

Both sides prove the secret before they read a message:

    accepting     MAGIC, challenge                          32 random bytes
    connecting    challenge, its own address, proof
    accepting     accepted, proof; or refused, and the end

    proof = HMAC-SHA256(secret, (side, both challenges, accepting address, connecting address))

For the accepting address, the connecting side takes the address that it dialled, and the accepting side takes
the address that it advertises. So a stranger on a relay's port cannot forward a proof to another relay. The
secret never travels, and a proof is valid for one connection only. Later messages are not encrypted and not
signed: an attacker who can change packets between two hosts can change weights.

Every wait has a deadline. If the peer's process ends, the link fails at once. If the peer sends or takes no
byte for `stall_s`, the link fails. If the peer's host is gone, the kernel ends the link.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import msgspec

from millrace.core.errors import MillraceError, WeightsError

MAGIC = b"MLLRCHN2"
CHALLENGE_BYTES = 32
PROOF_BYTES = 32
ACCEPTED, REFUSED = b"\1", b"\0"
CONNECTING, ACCEPTING = "connecting", "accepting"
FRAME_BYTES_MAX = 16 << 20  # a manifest and its frame
DELIVERY_RATE = slice(160, 168)  # in struct tcp_info of Linux: bytes in a second
AHEAD_BYTES, READ_BYTES = 4 << 10, 64 << 10


class LinkDeadlines(msgspec.Struct, frozen=True):
    """How long a relay waits for another relay.

    `connect_s`: for a connection and the proofs. `stall_s`: for the next bytes. `begin_s`: until a requested
    version begins to arrive at the source. `wait_s`: for a chunk that the source itself waits for. The source
    sends `Waiting` every `heartbeat_s`.
    """

    connect_s: float = 3.0
    stall_s: float = 4.0
    begin_s: float = 2.0
    wait_s: float = 10.0
    heartbeat_s: float = 1.0


DEADLINES = LinkDeadlines()


class Identity(msgspec.Struct, frozen=True):
    """A relay as other relays of its run know it. `address`: HOST:PORT. `secret`: of the run."""

    address: str
    secret: str


class VersionRequest(msgspec.Struct, frozen=True, tag=True):
    """A request for a version. `complete`: complete versions of the receiver, (version, published digest).
    `pulls`: the receiver pulls raw chunks through NIXL."""

    version: int
    digest: str
    complete: list[tuple[int, str]]
    pulls: bool = False


class VersionOffer(msgspec.Struct, frozen=True, tag=True):
    """The version's encoded manifest. `base`: a version that both sides have, for deltas. `agent`: the
    metadata with which the receiver pulls; empty: the source has no NIXL."""

    manifest: bytes
    base: tuple[int, str] | None = None
    agent: bytes = b""


class Unknown(msgspec.Struct, frozen=True, tag=True):
    """The source does not have the version, or lost it."""

    reason: str


class Want(msgspec.Struct, frozen=True, tag=True):
    """The chunks to send: one bit each, in the order of the manifest. `deltas`: the source may send deltas
    against the base."""

    chunks: bytes
    deltas: bool = False


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """A sign of life. From the source: the next chunk is not here yet. From the receiver: it still pulls.
    `reached_bytes`: of the version, as far as the source or a relay before it has come."""

    reached_bytes: int = 0


class Chunk(msgspec.Struct, frozen=True, tag=True):
    """A chunk in `encoding`. Its `num_bytes` follow. For NIXL they lie at `address`, with `checksum`."""

    index: int
    encoding: str
    num_bytes: int
    address: int = 0
    checksum: int = 0


class ChunkChecksum(msgspec.Struct, frozen=True, tag=True):
    """Follows the bytes of a chunk. `digest`: XXH3-64 of the bytes; None: the slot was overwritten."""

    digest: int | None


class Taken(msgspec.Struct, frozen=True, tag=True):
    """The receiver has pulled the announced chunks, at `bytes_s`. `wrong`: a chunk has a wrong checksum."""

    wrong: bool
    bytes_s: float


Message = VersionRequest | VersionOffer | Unknown | Want | Waiting | Chunk | ChunkChecksum | Taken
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Link:
    """One connection whose other side has proved the secret. Its errors name the peer.

    A small buffer takes the end of one chunk and the message of the next chunk in one read. The bytes of
    chunks go directly to their place, in few large reads.
    """

    def __init__(self, connection: socket.socket, peer: str, deadlines: LinkDeadlines) -> None:
        self._socket, self.peer, self._deadlines = connection, peer, deadlines
        self._loop = asyncio.get_running_loop()
        self._buffer, self._ahead = bytearray(AHEAD_BYTES), memoryview(b"")  # `_ahead`: read, not yet used
        self._wakes_at = 1

    async def send(self, message: Message) -> None:
        body = msgspec.msgpack.encode(message)
        await self.send_bytes(memoryview(len(body).to_bytes(4, "big") + body))

    async def send_bytes(self, data: memoryview) -> None:
        """Send all of `data`, without a copy."""

        def send() -> int:
            nonlocal data
            with suppress(BlockingIOError):
                data = data[self._socket.send(data) :]
            return len(data)

        with self._failing("takes"):
            await self._repeat(send, self._loop.add_writer, self._loop.remove_writer)

    def carried_bytes_s(self) -> float:
        """The link's recent rate, as the kernel measured it. An idle link measures less than it could
        carry."""
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, DELIVERY_RATE.stop)
        return float(int.from_bytes(info[DELIVERY_RATE], sys.byteorder))

    async def receive(self) -> Message:
        """The next message."""
        length = int.from_bytes(await self._exactly(4), "big")
        if length > FRAME_BYTES_MAX:
            raise WeightsError(f"the relay at {self.peer} announces a frame of {length} bytes: is it one?")
        body = await self._exactly(length)
        try:
            return _DECODER.decode(body)
        except msgspec.MsgspecError as error:
            raise WeightsError(f"the relay at {self.peer} sent what is no message: {error}") from error

    async def receive_into(self, buffer: memoryview, arrived: Callable[[int], None] = lambda _: None) -> None:
        """Fill all of `buffer`. `arrived` is called with the number of bytes of each read."""
        count = min(len(buffer), len(self._ahead))
        buffer[:count], self._ahead = self._ahead[:count], self._ahead[count:]
        await self._receive(buffer[count:], len(buffer) - count, arrived)

    async def _exactly(self, num_bytes: int) -> bytearray:
        data, ahead = bytearray(num_bytes), len(self._ahead)
        if ahead < num_bytes <= AHEAD_BYTES:
            self._buffer[:ahead] = bytes(self._ahead)
            view = memoryview(self._buffer)
            self._ahead = view[: ahead + await self._receive(view[ahead:], num_bytes - ahead)]
        await self.receive_into(memoryview(data))
        return data

    async def _receive(
        self, buffer: memoryview, least: int, arrived: Callable[[int], None] = lambda _: None
    ) -> int:
        """Receive at least `least` bytes, and as many more as are here and fit `buffer`. Returns the
        number."""
        received = 0

        def receive() -> int:
            nonlocal received
            if least > received:
                with suppress(BlockingIOError):
                    count = self._socket.recv_into(buffer[received:])
                    if not count:
                        raise WeightsError(f"the relay at {self.peer} has ended the connection")
                    received += count
                    arrived(count)
                self._wake_at(max(1, min(least - received, READ_BYTES)))
            return max(0, least - received)

        with self._failing("sends"):
            await self._repeat(receive, self._loop.add_reader, self._loop.remove_reader)
        return received

    def _wake_at(self, num_bytes: int) -> None:
        """Let the kernel wait for `num_bytes`: few large reads are faster than many small reads."""
        if num_bytes != self._wakes_at:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._wakes_at = num_bytes

    async def _repeat(
        self, transfer: Callable[[], int], add: Callable[..., object], remove: Callable[[int], object]
    ) -> None:
        """Call `transfer` whenever the socket is ready, until it returns 0: the bytes that remain."""
        remaining = transfer()
        if not remaining:
            return
        done, descriptor = self._loop.create_future(), self._socket.fileno()

        def ready() -> None:
            nonlocal remaining
            if done.done():
                return
            try:
                remaining = transfer()
            except Exception as error:
                done.set_exception(error)
            else:
                if not remaining:
                    done.set_result(None)

        add(descriptor, ready)
        try:
            while not done.done():
                before = remaining
                await asyncio.wait([done], timeout=self._deadlines.stall_s)
                ready()  # fewer bytes may be here than the kernel waits for
                if remaining == before and not done.done():
                    raise TimeoutError
        finally:
            remove(descriptor)
        await done

    @contextmanager
    def _failing(self, does: str) -> Iterator[None]:
        with naming(self.peer, f"{does} nothing any more for {self._deadlines.stall_s:g} s"):
            yield

    async def prove_first(self, own: Identity) -> None:
        """Prove the secret as the connecting side. `peer` is the address that was dialled."""
        greeting = bytes(await self._exactly(len(MAGIC) + CHALLENGE_BYTES))
        if not greeting.startswith(MAGIC):
            raise WeightsError(f"at {self.peer} there is no relay of this version of Millrace")
        ours, address = secrets.token_bytes(CHALLENGE_BYTES), own.address.encode()
        transcript = greeting[len(MAGIC) :] + ours, self.peer.encode(), address
        proof = _proof(own.secret, CONNECTING, *transcript)
        await self.send_bytes(memoryview(ours + bytes([len(address)]) + address + proof))
        verdict = bytes(await self._exactly(1))
        if verdict != ACCEPTED:
            raise WeightsError(
                f"the relay at {self.peer} refuses this one: their secrets or its address differ. "
                "All relays of a run have the same secret. That one may be of another run, or a stranger "
                "listens there who passes connections on to a relay"
            )
        expected = _proof(own.secret, ACCEPTING, *transcript)
        if not hmac.compare_digest(await self._exactly(PROOF_BYTES), expected):
            raise WeightsError(f"the relay at {self.peer} does not know the secret of this run")

    async def prove_second(self, own: Identity) -> None:
        """Prove the secret as the accepting side. `peer` becomes the peer's own address. Raises WeightsError:
        the peer was refused, and was told."""
        ours = secrets.token_bytes(CHALLENGE_BYTES)
        await self.send_bytes(memoryview(MAGIC + ours))
        *theirs, length = await self._exactly(CHALLENGE_BYTES + 1)
        address = bytes(await self._exactly(length))
        transcript = ours + bytes(theirs), own.address.encode(), address
        expected = _proof(own.secret, CONNECTING, *transcript)
        if not hmac.compare_digest(await self._exactly(PROOF_BYTES), expected):
            await self.send_bytes(memoryview(REFUSED))
            raise WeightsError(f"{self.peer} does not know the secret of this run")
        await self.send_bytes(memoryview(ACCEPTED + _proof(own.secret, ACCEPTING, *transcript)))
        self.peer = address.decode()


@asynccontextmanager
async def connected(address: str, own: Identity, deadlines: LinkDeadlines) -> AsyncIterator[Link]:
    """A link to the relay at `address` (HOST:PORT).

    Raises: WeightsError: nobody answers there, or the peer has another secret or another address.
    """
    connection = None
    try:
        with naming(address, f"does not answer within {deadlines.connect_s:g} s"):
            async with asyncio.timeout(deadlines.connect_s):
                connection = await _connect(address)
                link = Link(connection, address, deadlines)
                await link.prove_first(own)
        yield link
    finally:
        if connection is not None:
            connection.close()


@asynccontextmanager
async def accepted(
    connection: socket.socket, peer: str, own: Identity, deadlines: LinkDeadlines
) -> AsyncIterator[Link]:
    """A link to a peer that has connected. Raises: WeightsError: it has another secret, or sends nothing."""
    try:
        with naming(peer, f"did not prove the secret within {deadlines.connect_s:g} s"):
            async with asyncio.timeout(deadlines.connect_s):
                link = Link(prepared(connection), peer, deadlines)
                await link.prove_second(own)
        yield link
    finally:
        connection.close()


def listening(address: str) -> tuple[socket.socket, str]:
    """A socket that listens on this host's own `address`, and its HOST:PORT. Raises: OSError."""
    family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
    server = socket.create_server((address, 0), family=family)
    server.setblocking(False)
    host = f"[{address}]" if ":" in address else address
    return server, f"{host}:{server.getsockname()[1]}"


def prepared(connection: socket.socket) -> socket.socket:
    """Set the socket to send small frames at once, and to find within 3 s that a host is gone, idle or
    not."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3000)
    return connection


@contextmanager
def naming(peer: str, silence: str) -> Iterator[None]:
    """Turn errors of sockets and deadlines into WeightsErrors that name the peer."""
    try:
        yield
    except MillraceError:
        raise
    except TimeoutError as error:
        raise WeightsError(f"the relay at {peer} {silence}") from error
    except OSError as error:
        raise WeightsError(f"the relay at {peer} cannot be reached: {error.strerror or error}") from error


async def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, socket_address = infos[0]
    connection = prepared(socket.socket(family, kind, protocol))
    try:
        await loop.sock_connect(connection, socket_address)
    except BaseException:
        connection.close()
        raise
    return connection


def _proof(secret: str, side: str, challenges: bytes, accepting: bytes, connecting: bytes) -> bytes:
    transcript = msgspec.msgpack.encode((side, challenges, accepting, connecting))
    return hmac.new(secret.encode(), transcript, hashlib.sha256).digest()


def as_bytes(data: Any) -> memoryview:
    """The bytes of a contiguous array, for a socket."""
    return memoryview(data).cast("B")
