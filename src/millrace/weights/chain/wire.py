"""Links between relays: frames over TCP, between two that have proved to know the run's secret.

    frame    4 bytes length, then a message in msgpack; after a `Chunk` its bytes and a `ChunkChecksum` follow

Both sides prove the secret before either reads a message:

    accepting     MAGIC, challenge                          32 random bytes
    connecting    challenge, its own address, proof
    accepting     accepted, proof; or refused, and the end

    proof = HMAC-SHA256(secret, (side, both challenges, accepting address, connecting address))

The connecting side takes the accepting address that it dialled, and the accepting side the one that it
advertises. So a stranger who takes a relay's port cannot pass a proof on to another relay. The secret never
travels, and a proof is good for one connection only. What follows is not encrypted and not signed: who can
change packets between two hosts can change weights.

Every wait has a deadline. A peer whose process ends is seen at once. For one that falls silent, or takes
nothing more, `stall_s` is the longest time without a byte. The kernel ends links whose other host is gone.
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
    """How long a relay waits for another one.

    `connect_s`: for a connection and the proofs. `stall_s`: for the next bytes. `begin_s`: until a version
    that was asked for begins to arrive there. `wait_s`: for a chunk, while the other waits itself. It says so
    every `heartbeat_s`.
    """

    connect_s: float = 3.0
    stall_s: float = 4.0
    begin_s: float = 2.0
    wait_s: float = 10.0
    heartbeat_s: float = 1.0


DEADLINES = LinkDeadlines()


class Identity(msgspec.Struct, frozen=True):
    """A relay to others of its run. `address`: where they reach it, HOST:PORT. `secret`: of the run."""

    address: str
    secret: str


class VersionRequest(msgspec.Struct, frozen=True, tag=True):
    """Give me this version. `held`: what the asking relay has whole, (version, published digest). `pulls`: it
    pulls raw chunks through NIXL."""

    version: int
    digest: str
    held: list[tuple[int, str]]
    pulls: bool = False


class VersionOffer(msgspec.Struct, frozen=True, tag=True):
    """Its encoded manifest. `base`: a version that both sides have, against which chunks may be encoded.
    `agent`: what the other needs to pull, if it pulls; empty: there is no NIXL here."""

    manifest: bytes
    base: tuple[int, str] | None = None
    agent: bytes = b""


class Unknown(msgspec.Struct, frozen=True, tag=True):
    """The version is not here, or not any more."""

    reason: str


class Want(msgspec.Struct, frozen=True, tag=True):
    """Send these chunks: one bit each, in the order of the manifest. `deltas`: some may come as deltas
    against the base."""

    chunks: bytes
    deltas: bool = False


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """The next chunk is not here yet, but I am; or, of who pulls, not all that was announced."""


class Chunk(msgspec.Struct, frozen=True, tag=True):
    """`num_bytes` follow, encoded as `encoding` says. Or they wait at `address`, and fit `checksum`."""

    index: int
    encoding: str
    num_bytes: int
    address: int = 0
    checksum: int = 0


class ChunkChecksum(msgspec.Struct, frozen=True, tag=True):
    """After the bytes of a chunk. `digest`: XXH3-64 of these; None: they were overwritten meanwhile."""

    digest: int | None


class Taken(msgspec.Struct, frozen=True, tag=True):
    """What was announced has been pulled, at `bytes_s`. `wrong`: some of it does not fit its seal."""

    wrong: bool
    bytes_s: float


Message = VersionRequest | VersionOffer | Unknown | Want | Waiting | Chunk | ChunkChecksum | Taken
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Link:
    """One connection whose other side has proved the secret. Its errors name the peer.

    Messages are read through a small buffer, so that the end of one chunk and the head of the next are one
    read. The bytes of chunks go straight to their place, in few large reads.
    """

    def __init__(self, connection: socket.socket, peer: str, deadlines: LinkDeadlines) -> None:
        self._socket, self.peer, self._deadlines = connection, peer, deadlines
        self._loop = asyncio.get_running_loop()
        self._buffer, self._ahead = bytearray(AHEAD_BYTES), memoryview(b"")  # read already, of no message yet
        self._wakes_at = 1

    async def send(self, message: Message) -> None:
        body = msgspec.msgpack.encode(message)
        await self.send_bytes(memoryview(len(body).to_bytes(4, "big") + body))

    async def send_bytes(self, data: memoryview) -> None:
        """All of `data`, from where it lies."""

        def give() -> int:
            nonlocal data
            with suppress(BlockingIOError):
                data = data[self._socket.send(data) :]
            return len(data)

        with self._failing("takes"):
            await self._repeat(give, self._loop.add_writer, self._loop.remove_writer)

    def carried_bytes_s(self) -> float:
        """What the kernel saw the link carry lately; with little to carry, less than it can. 0: nothing."""
        told = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, DELIVERY_RATE.stop)
        return float(int.from_bytes(told[DELIVERY_RATE], sys.byteorder))

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

    async def receive_into(self, buffer: memoryview) -> None:
        """Fill all of `buffer`."""
        taken = min(len(buffer), len(self._ahead))
        buffer[:taken], self._ahead = self._ahead[:taken], self._ahead[taken:]
        await self._receive(buffer[taken:], len(buffer) - taken)

    async def _exactly(self, num_bytes: int) -> bytearray:
        data, ahead = bytearray(num_bytes), len(self._ahead)
        if ahead < num_bytes <= AHEAD_BYTES:
            self._buffer[:ahead] = bytes(self._ahead)
            whole = memoryview(self._buffer)
            self._ahead = whole[: ahead + await self._receive(whole[ahead:], num_bytes - ahead)]
        await self.receive_into(memoryview(data))
        return data

    async def _receive(self, buffer: memoryview, least: int) -> int:
        """So many bytes, and what else is here already and has room in `buffer`. Returns how many."""
        received = 0

        def take() -> int:
            nonlocal received
            if least > received:
                with suppress(BlockingIOError):
                    now = self._socket.recv_into(buffer[received:])
                    if not now:
                        raise WeightsError(f"the relay at {self.peer} has ended the connection")
                    received += now
                self._wake_at(max(1, min(least - received, READ_BYTES)))
            return max(0, least - received)

        with self._failing("sends"):
            await self._repeat(take, self._loop.add_reader, self._loop.remove_reader)
        return received

    def _wake_at(self, num_bytes: int) -> None:
        """Ask the kernel to wait for so many: few large reads instead of many small ones."""
        if num_bytes != self._wakes_at:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._wakes_at = num_bytes

    async def _repeat(
        self, step: Callable[[], int], add: Callable[..., object], remove: Callable[[int], object]
    ) -> None:
        """Do `step` whenever the socket is ready, until it says that no byte is left."""
        left = step()
        if not left:
            return
        done, number = self._loop.create_future(), self._socket.fileno()

        def ready() -> None:
            nonlocal left
            if done.done():
                return
            try:
                left = step()
            except Exception as error:
                done.set_exception(error)
            else:
                if not left:
                    done.set_result(None)

        add(number, ready)
        try:
            while not done.done():
                before = left
                await asyncio.wait([done], timeout=self._deadlines.stall_s)
                ready()  # less may have come than the kernel was to wait for
                if left == before and not done.done():
                    raise TimeoutError
        finally:
            remove(number)
        await done

    @contextmanager
    def _failing(self, does: str) -> Iterator[None]:
        with naming(self.peer, f"{does} nothing any more for {self._deadlines.stall_s:g} s"):
            yield

    async def prove_first(self, own: Identity) -> None:
        """As the connecting side. `peer` is the address that was dialled."""
        greeting = bytes(await self._exactly(len(MAGIC) + CHALLENGE_BYTES))
        if not greeting.startswith(MAGIC):
            raise WeightsError(f"at {self.peer} there is no relay of this version of Millrace")
        ours, address = secrets.token_bytes(CHALLENGE_BYTES), own.address.encode()
        said = greeting[len(MAGIC) :] + ours, self.peer.encode(), address
        proof = _proof(own.secret, CONNECTING, *said)
        await self.send_bytes(memoryview(ours + bytes([len(address)]) + address + proof))
        verdict = bytes(await self._exactly(1))
        if verdict != ACCEPTED:
            raise WeightsError(
                f"the relay at {self.peer} refuses this one: their secrets or its address differ. "
                "All relays of a run have the same secret. That one may be of another run, or a stranger "
                "listens there who passes connections on to a relay"
            )
        if not hmac.compare_digest(await self._exactly(PROOF_BYTES), _proof(own.secret, ACCEPTING, *said)):
            raise WeightsError(f"the relay at {self.peer} does not know the secret of this run")

    async def prove_second(self, own: Identity) -> None:
        """As the accepting side. `peer` becomes the other's own address. Raises WeightsError: refused, and
        told so."""
        ours = secrets.token_bytes(CHALLENGE_BYTES)
        await self.send_bytes(memoryview(MAGIC + ours))
        *theirs, length = await self._exactly(CHALLENGE_BYTES + 1)
        address = bytes(await self._exactly(length))
        said = ours + bytes(theirs), own.address.encode(), address
        if not hmac.compare_digest(await self._exactly(PROOF_BYTES), _proof(own.secret, CONNECTING, *said)):
            await self.send_bytes(memoryview(REFUSED))
            raise WeightsError(f"{self.peer} does not know the secret of this run")
        await self.send_bytes(memoryview(ACCEPTED + _proof(own.secret, ACCEPTING, *said)))
        self.peer = address.decode()


@asynccontextmanager
async def connected(address: str, own: Identity, deadlines: LinkDeadlines) -> AsyncIterator[Link]:
    """A link to the relay at `address` (HOST:PORT).

    Raises: WeightsError: nobody answers there, or who answers has another secret or another address.
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
    """A link to who has connected. Raises: WeightsError: it has another secret, or falls silent."""
    try:
        with naming(peer, f"did not prove the secret within {deadlines.connect_s:g} s"):
            async with asyncio.timeout(deadlines.connect_s):
                link = Link(prepared(connection), peer, deadlines)
                await link.prove_second(own)
        yield link
    finally:
        connection.close()


def listening(address: str) -> tuple[socket.socket, str]:
    """A socket that listens on this host's own `address`, and where that is: HOST:PORT. Raises: OSError."""
    family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
    server = socket.create_server((address, 0), family=family)
    server.setblocking(False)
    host = f"[{address}]" if ":" in address else address
    return server, f"{host}:{server.getsockname()[1]}"


def prepared(connection: socket.socket) -> socket.socket:
    """Send small frames at once, and notice a host that is gone in 3 s, idle or not."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3000)
    return connection


@contextmanager
def naming(peer: str, silence: str) -> Iterator[None]:
    """What sockets and deadlines raise, as ours, with the peer's name."""
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
    found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, place = found[0]
    connection = prepared(socket.socket(family, kind, protocol))
    try:
        await asyncio.get_running_loop().sock_connect(connection, place)
    except BaseException:
        connection.close()
        raise
    return connection


def _proof(secret: str, side: str, challenges: bytes, accepting: bytes, connecting: bytes) -> bytes:
    said = msgspec.msgpack.encode((side, challenges, accepting, connecting))
    return hmac.new(secret.encode(), said, hashlib.sha256).digest()


def as_bytes(data: Any) -> memoryview:
    """A contiguous array as what sockets take."""
    return memoryview(data).cast("B")
