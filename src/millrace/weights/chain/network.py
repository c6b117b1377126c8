"""A relay's network: the relay serves its versions to other relays, and fetches versions from other relays.

A thread with an event loop of its own sends and receives. So no transfer waits for a call of the role, and a
busy role still answers.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress

import msgspec

from millrace.core.digest import TensorSpec
from millrace.core.errors import WeightsError, leaves
from millrace.core.pulse import Pulse
from millrace.weights.chain.fetching import Order, fetch
from millrace.weights.chain.holding import ChunkedVersion, arriving, written
from millrace.weights.chain.nixl.link import NIXL, Agent
from millrace.weights.chain.sending import answer
from millrace.weights.chain.wire import Identity, Link, LinkDeadlines, VersionRequest, accepted, listening
from millrace.weights.layout import Memory

LOG = logging.getLogger(__name__)
LINKS_MAX = 64
"""Relays of the run that are served at the same time. Later relays wait until a link ends."""
UNPROVED_MAX = 64
"""Connections that have not proved the secret yet. A later connection takes the place of the oldest."""
THREAD_S = 10.0
"""The longest wait for the thread's start and end. It is a daemon: the process does not wait at its exit."""


class Fetched(msgspec.Struct, frozen=True):
    """A version that is readable now. `digest`: of whole tensors; `source`: the address of the last relay.
    `decoded_bytes`: `received_bytes` as they are in the slot; `encodings`: number of chunks of each kind."""

    digest: str
    source: str = ""
    received_bytes: int = 0
    decoded_bytes: int = 0
    encodings: dict[str, int] = {}


class Network:
    """Listens, serves and fetches until `close`.

    Attributes:
        address  HOST:PORT where it listens
    """

    def __init__(
        self,
        name: str,
        memory: Memory,
        *,
        address: str,
        secret: str,
        deadlines: LinkDeadlines,
        transport: str,
    ) -> None:
        self._name, self._slot_bytes = name, memory.slot_bytes
        self._deadlines = deadlines
        self._agent = Agent(name, memory) if transport == NIXL else None
        try:
            self._listener, self.address = listening(address)
        except OSError as error:
            raise WeightsError(
                f"relay `{name}` cannot listen on {address} ({error.strerror or error}): this must be an "
                "address of its own host"
            ) from error
        self._identity = Identity(self.address, secret)
        self._unproved: dict[socket.socket, None] = {}  # the oldest first
        self._strangers = 0
        self._fetches: dict[tuple[int, str], asyncio.Task[None]] = {}
        self._memory = memory
        self._rates: dict[str, float] = {}
        ready: Future[None] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run(ready)), name="relay network", daemon=True
        )
        self._thread.start()
        ready.result(THREAD_S)

    async def fetch(self, version: int, digest: str, sources: Sequence[str]) -> Fetched:
        """Fetch a version and make it readable. One version at a time, in the order of the calls.

        A later call for the same version takes over, and the earlier call raises WeightsError.
        Raises: as `fetching.fetch`.
        """
        future: Future[Fetched] = Future()
        future.set_running_or_notify_cancel()
        self._loop.call_soon_threadsafe(self._start, (version, digest), list(sources), future)
        return await asyncio.wrap_future(future)

    def staged(self) -> None:
        """Another version is complete: wake the links that wait for it."""
        self._loop.call_soon_threadsafe(self._versions.news.fire)

    def close(self) -> None:
        """End every link. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(THREAD_S)

    async def _run(self, ready: Future[None]) -> None:
        """Consumes connections and orders to fetch; ends with `close`."""
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        self._versions, self._turn = Versions(self._memory), asyncio.Lock()
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            accepting = tasks.create_task(self._accept())
            ready.set_result(None)
            await self._closing.wait()
            accepting.cancel()
            for task in self._fetches.values():
                task.cancel()
        self._listener.close()

    async def _accept(self) -> None:
        room = asyncio.Semaphore(LINKS_MAX)
        async with asyncio.TaskGroup() as links:
            while True:
                connection, peer = await self._accepted()
                if len(self._unproved) == UNPROVED_MAX:
                    self._end_unproved(next(iter(self._unproved)))
                self._unproved[connection] = None
                links.create_task(self._serve(connection, f"{peer[0]}:{peer[1]}", room))
                await asyncio.sleep(0)  # present links go on, even if many connections come

    def _end_unproved(self, connection: socket.socket) -> None:
        """End a connection: its task then ends too."""
        del self._unproved[connection]
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    async def _accepted(self) -> tuple[socket.socket, tuple[str, int]]:
        while True:
            try:
                connection, peer = await self._loop.sock_accept(self._listener)
                return connection, (peer[0], peer[1])
            except OSError:  # the caller is gone already, or no file descriptor is free for now
                await asyncio.sleep(self._deadlines.heartbeat_s)

    async def _serve(self, connection: socket.socket, peer: str, room: asyncio.Semaphore) -> None:
        """Serve one request. After any error the receiver gets a message, or sees the connection end."""
        proved = False
        try:
            async with accepted(connection, peer, self._identity, self._deadlines) as link:
                proved = True
                self._unproved.pop(connection, None)
                async with room:
                    await self._answer(link)
        except WeightsError as error:
            if proved:
                LOG.warning("relay `%s`: %s", self._name, error)
            else:
                self._count_stranger(error)
        except Exception:
            LOG.exception("relay `%s`: serving %s", self._name, peer)
        finally:
            self._unproved.pop(connection, None)

    def _count_stranger(self, error: WeightsError) -> None:
        """Log a line each time that the number of strangers has doubled."""
        self._strangers += 1
        if self._strangers.bit_count() == 1:
            LOG.warning(
                "relay `%s`: %d connections did not prove the secret of the run. The last one: %s",
                self._name,
                self._strangers,
                error,
            )

    async def _answer(self, link: Link) -> None:
        if self._agent is None:
            return await answer(link, self._versions, self._deadlines, self._rates)
        try:
            async with asyncio.TaskGroup() as tasks:
                moving = tasks.create_task(self._agent.progress())
                await answer(link, self._versions, self._deadlines, self._rates, self._agent.metadata)
                moving.cancel()
        except BaseExceptionGroup as group:
            raise next(leaves(group)) from None

    def _start(self, key: tuple[int, str], sources: Sequence[str], future: Future[Fetched]) -> None:
        if key in self._fetches:
            self._fetches[key].cancel()
        self._fetches[key] = task = self._tasks.create_task(self._fetch(key, sources, future))
        task.add_done_callback(lambda _: self._forget(key, task))

    def _forget(self, key: tuple[int, str], task: asyncio.Task[None]) -> None:
        if self._fetches.get(key) is task:
            del self._fetches[key]

    async def _fetch(self, key: tuple[int, str], sources: Sequence[str], future: Future[Fetched]) -> None:
        """Fetch, and give `future` the result or the error in every case."""
        try:
            async with self._turn:
                future.set_result(await self._fetched(*key, sources))
        except asyncio.CancelledError:
            future.set_exception(
                WeightsError(
                    f"relay `{self._name}` stopped to fetch version {key[0]}: another order took over, "
                    "or the relay closes"
                )
            )
        except Exception as error:
            future.set_exception(error)

    async def _fetched(self, version: int, digest: str, sources: Sequence[str]) -> Fetched:
        versions = self._versions
        order = Order(
            VersionRequest(version, digest, versions.present(), pulls=self._agent is not None),
            self._slot_bytes,
            lambda manifest: versions.begin(version, manifest, digest),
            lambda base, chunked: versions.base([base], chunked),
            self._identity,
            self._deadlines,
            self._agent,
        )
        ours = versions.find(version, digest)
        try:
            with _pinned(ours):
                chunked, source = await fetch(order, sources, ours)
                whole_digest = chunked.finish()
        except BaseException:
            versions.ended(version, digest, "no source of it is left")
            raise
        return Fetched(
            whole_digest,
            source,
            chunked.received_bytes,
            chunked.decoded_bytes,
            dict(chunked.encodings),
        )


@contextmanager
def _pinned(chunked: ChunkedVersion | None) -> Iterator[None]:
    """Pin the slot that ranks of this host wrote, so that they take another slot until it is complete."""
    if chunked is None or not chunked.writers:
        yield
        return
    pinned = chunked.memory.records["pinned"]
    pinned[chunked.slot] = chunked.sequence
    try:
        yield
    finally:
        pinned[chunked.slot] = 0


# ---------------------------------------------------------------- versions to send


class Versions:
    """The versions in a relay's slots, and at most one version that arrives (a `sending.VersionSource`)."""

    def __init__(self, memory: Memory) -> None:
        self._memory, self.news = memory, Pulse()
        self._written: dict[tuple[int, int], ChunkedVersion] = {}  # by slot and sequence
        self._arriving: ChunkedVersion | None = None

    def find(self, version: int, digest: str) -> ChunkedVersion | None:
        """The version: complete, written in part by the ranks of this host, or arriving."""
        for chunked in [*self._all_written(), *filter(None, [self._arriving])]:
            if (chunked.version, chunked.digest) == (version, digest) and chunked.intact:
                return chunked
        return None

    def present(self) -> list[tuple[int, str]]:
        """Complete versions: (version, published digest)."""
        return [(chunked.version, chunked.digest) for chunked in self._all_complete()]

    def base(self, versions: Iterable[tuple[int, str]], like: ChunkedVersion) -> ChunkedVersion | None:
        """The newest of `versions` that is complete here and has the chunks of `like`."""
        keys = set(map(tuple, versions))
        bases = (base for base in self._all_complete() if (base.version, base.digest) in keys)
        return max(
            (base for base in bases if base is not like and base.same_layout(like)),
            key=lambda base: base.version,
            default=None,
        )

    def begin(self, version: int, manifest: Sequence[TensorSpec], digest: str) -> ChunkedVersion:
        """The slot of a version that is to arrive, new or with chunks of the version. Raises WeightsError."""
        chunked = self.find(version, digest)
        if chunked is None:
            if self._arriving is not None:
                self._arriving.end(f"version {version} took its place")
            chunked = self._arriving = arriving(self._memory, version, manifest)
        chunked.begin()
        self.news.fire()
        return chunked

    def ended(self, version: int, digest: str, reason: str) -> None:
        """The missing chunks of a version will not arrive for now."""
        if (chunked := self.find(version, digest)) is not None:
            chunked.end(reason)

    def _all_written(self) -> list[ChunkedVersion]:
        memory, former, present = self._memory, self._written, dict[tuple[int, int], ChunkedVersion]()
        if self._arriving is not None:
            former[self._arriving.slot, self._arriving.sequence] = self._arriving
        for slot in range(memory.slots):
            place = slot, memory.sequence(slot)
            if memory.written(slot):
                with suppress(WeightsError):  # overwritten at this moment
                    present[place] = former.get(place) or written(memory, *place)
        self._written = present
        return list(present.values())

    def _all_complete(self) -> list[ChunkedVersion]:
        return [chunked for chunked in self._all_written() if self._memory.complete(chunked.slot)]
