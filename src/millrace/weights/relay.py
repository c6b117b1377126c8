"""The relay: owns the memory of published weights on one host, and verifies the weights in it."""

from __future__ import annotations

import asyncio
import os
import time
from contextvars import copy_context
from functools import partial

from msgspec.structs import replace

from millrace.core.digest import published_digest
from millrace.core.errors import (
    ConfigError,
    DigestMismatchError,
    TornVersionError,
    UnknownVersionError,
    WeightsError,
    boundary,
)
from millrace.core.types import Endpoint, Staged, Stored
from millrace.weights.chain.network import Fetched, Network
from millrace.weights.chain.wire import DEADLINES, LinkDeadlines
from millrace.weights.layout import Memory, confirm, create
from millrace.weights.manifest import check_sequence, digest_slot, read_manifest
from millrace.weights.store.directory import Directory
from millrace.weights.store.history import BackgroundThread, OlderVersions, reason_of
from millrace.weights.store.restoring import all_slot_weights, restore


class RelayWorker:
    """Role `millrace.weights.relay:RelayWorker` (a core.protocols.Relay).

    Args:
        name: shown in errors.
        slots: versions that are complete in memory at the same time, at least 2: one is read, one is written.
        versions: all versions in memory; those beyond `slots` are deltas, which fill at most half a slot.
        address: of this host, where the relay listens for relays of other hosts; empty: nowhere.
        secret: of the run; relays prove to each other that they know it.
        transport: of raw chunks between hosts: "tcp", or "nixl".
        deadlines: how long the relay waits for other relays.
        directory: the URL where the relay stores versions; None: nowhere.
        anchor_every: every `anchor_every`th version in the directory is a complete one.
        owner: the run's name in the directory.
    """

    def __init__(
        self,
        name: str,
        slots: int,
        *,
        versions: int = 0,
        address: str = "",
        secret: str = "",
        transport: str = "tcp",
        deadlines: LinkDeadlines = DEADLINES,
        directory: str | None = None,
        anchor_every: int = 20,
        owner: str = "",
    ) -> None:
        if slots < 2:
            raise ConfigError(f"`weights.slots` ({slots}) must be at least 2: one is read, one is written")
        self._name, self._slots, self._versions = name, slots, versions
        if address and not secret:
            raise ConfigError(f"relay `{name}` is to listen on {address}: it needs the secret of the run")
        make = partial(
            Network, name, address=address, secret=secret, deadlines=deadlines, transport=transport
        )
        self._make_network = make if address else None
        self._directory, self._anchor_every, self._owner = directory, anchor_every, owner
        self._lock, self._restoring = asyncio.Lock(), asyncio.Lock()
        self._storer: Storer | None = None
        self._fd = -1
        self._memory: Memory | None = None
        self._older: OlderVersions | None = None
        self._network: Network | None = None

    async def open(self, slot_bytes: int) -> Endpoint:
        """Allocate every page of the slots, and return where the slots are. Idempotent.

        Raises:
            WeightsError: open already with another size, or no such memory or address.
        """
        async with self._lock:
            if self._memory is None:
                await asyncio.to_thread(self._allocate, slot_bytes)
            memory = self._opened()
            if memory.slot_bytes != slot_bytes:
                raise WeightsError(
                    f"relay `{self._name}` is open with {memory.slot_bytes} bytes per slot, "
                    f"asked for {slot_bytes}: one relay serves one model"
                )
            address = self._network.address if self._network else ""
            return Endpoint("memfd", f"/proc/{os.getpid()}/fd/{self._fd}", self._slots, slot_bytes, address)

    async def stage(self, version: int, digest: str) -> Staged:
        """Digest the version that the trainer wrote. If the result equals `digest`, make the version
        readable.

        `digest` is of the blocks that the trainer's processes wrote. The returned digest is of whole tensors,
        as replicas digest. A trainer of one process writes whole tensors: then the two are the same.

        To stage a staged version again confirms it without another read.

        Raises:
            UnknownVersionError: in no slot (never published, or already overwritten).
            TornVersionError: overwritten while it was digested.
            DigestMismatchError: the bytes here are not those that the trainer digested.
        """
        started = time.perf_counter()
        async with self._lock:
            memory = self._opened()
            tensors_digest = await asyncio.to_thread(self._stage, memory, version, digest)
            if self._network is not None:
                self._network.staged()
            stage_s = time.perf_counter() - started
            return self._staged(Staged(version, tensors_digest, memory.versions(), stage_s))

    async def fetch(self, version: int, digest: str, sources: list[str]) -> Staged:
        """Fetch `version`, published with `digest`, and make it readable. The source is the first relay of
        `sources` (HOST:PORT) that has or receives the version. If no relay can help, the relay reads the
        directories (URLs) of `sources`. Other relays may fetch chunks that are here already.

        Idempotent: the relay asks only for missing chunks. A later call for the same version takes over, and
        the earlier call raises WeightsError. A version that was fetched with another digest is replaced.

        Raises:
            UnknownVersionError: no source has the version.
            TornVersionError: another version took its slot.
            DigestMismatchError: the bytes that arrived differ from the published bytes.
            WeightsError: no source answers, or this relay has no address.
        """
        started = time.perf_counter()
        memory = self._opened()
        fetched = await asyncio.to_thread(_readable, memory, version, digest)
        if fetched is None:
            if self._older is not None and version in memory.versions():
                self._older.forget(version)  # the trainer made the version again
            with boundary(f"relay `{self._name}`", f"fetching version {version}", WeightsError):
                fetched = await self._fetched(memory, version, digest, sources)
        fetch_s = time.perf_counter() - started
        return self._staged(
            Staged(
                version,
                fetched.digest,
                memory.versions(),
                fetch_s,
                fetched.source,
                fetched.received_bytes,
                fetched.decoded_bytes,
                fetched.encodings,
            )
        )

    async def store(self, version: int, digest: str) -> Stored:
        """Write a readable version, published with `digest`, to the directory, in a thread of its own.
        Returns at once how the last write ended. Idempotent.

        Raises: ConfigError: the directory cannot be used. WeightsError: this relay has none.
        """
        if self._storer is None:
            if self._directory is None:
                raise WeightsError(f"relay `{self._name}` has no directory to store versions in")
            directory = await asyncio.to_thread(Directory, self._directory, self._owner)
            self._storer = self._storer or Storer(directory, self._opened(), anchor_every=self._anchor_every)
        return self._storer.ask(version, digest)

    def close(self) -> None:
        """Stop the service to other hosts. Readers of this host can still read. Idempotent."""
        if self._network is not None:
            self._network.close()

    async def _fetched(self, memory: Memory, version: int, digest: str, sources: list[str]) -> Fetched:
        async with self._restoring:
            pass  # wait until no restore writes into the slot that this fetch may take
        relays = [source for source in sources if "://" not in source]
        urls = [source for source in sources if "://" in source]
        failure: WeightsError | None = None
        if self._network is not None and (relays or not urls):  # ranks of this host may have every block
            try:
                return await self._network.fetch(version, digest, relays)
            except DigestMismatchError:
                raise
            except WeightsError as error:
                failure = error
        elif relays:
            failure = WeightsError(f"relay `{self._name}` has no address, so it cannot ask {relays}")
        for url in urls:
            try:
                return await self._restored(memory, version, digest, url)
            except WeightsError as error:
                failure = type(error)(f"{failure}; {error}") if failure else error
        raise failure or WeightsError(f"version {version} cannot be fetched: no source was named")

    async def _restored(self, memory: Memory, version: int, digest: str, url: str) -> Fetched:
        directory = await asyncio.to_thread(Directory, url)
        await self._restoring.acquire()
        running = asyncio.get_running_loop()
        work = partial(copy_context().run, restore, directory, memory, version, digest)
        writing = running.run_in_executor(None, work)
        writing.add_done_callback(self._has_written)
        num_bytes = await asyncio.shield(writing)
        if self._network is not None:
            self._network.staged()
        fetched = _readable(memory, version, digest)
        if fetched is None:
            raise TornVersionError(f"the slot of version {version} was taken when it had been read")
        return replace(fetched, source=url, received_bytes=num_bytes)

    def _has_written(self, writing: asyncio.Future[int]) -> None:
        """Free the slot of a restore. A cancelled restore's thread cannot be stopped, so it writes until
        here."""
        self._restoring.release()
        writing.cancelled() or writing.exception()  # retrieved here: the caller may not wait any more

    def _staged(self, staged: Staged) -> Staged:
        """`staged` with the versions that are kept as deltas. A new version makes an older one a delta."""
        if self._older is None:
            return staged
        self._older.keeping.ask()
        older, dropped = self._older.versions(), self._older.take_dropped()
        versions = sorted({*staged.versions, *older})
        return replace(staged, versions=versions, delta_versions=older, dropped=dropped)

    def _opened(self) -> Memory:
        if self._memory is None:
            raise WeightsError(f"relay `{self._name}` is not open: call `open` with the bytes of a version")
        return self._memory

    def _allocate(self, slot_bytes: int) -> None:
        if slot_bytes < 1:
            raise WeightsError(f"relay `{self._name}`: a version of {slot_bytes} bytes cannot be held")
        try:
            self._fd, memory = create(self._slots, slot_bytes)
            memory.fill()
        except OSError as error:
            raise WeightsError(
                f"relay `{self._name}` cannot have {self._slots} slots of {slot_bytes} bytes ({error}): "
                "lower `weights.slots` or free host memory"
            ) from error
        if self._versions > self._slots:
            self._older = OlderVersions(
                memory, self._fd, bytes_max=slot_bytes // 2, versions_max=self._versions - 1
            )
        if self._make_network is not None:
            self._network = self._make_network(memory)
        self._memory = memory

    def _stage(self, memory: Memory, version: int, digest: str) -> str:
        slot, sequence = self._find(memory, version)
        if self._older is not None:
            self._older.forget(version)
        manifest = read_manifest(memory, slot, sequence)
        if absent := sum(block.absent for spec in manifest for block in spec.blocks):
            raise UnknownVersionError(
                f"of weights version {version}, {absent} blocks were written on other hosts: relay "
                f"`{self._name}` must fetch these blocks"
            )
        if memory.complete(slot):
            tensors_digest, blocks_digest = memory.digest(slot), published_digest(manifest)
        else:
            tensors_digest, blocks_digest = digest_slot(memory, slot, manifest)
        check_sequence(memory, slot, sequence)
        if blocks_digest != digest:
            raise DigestMismatchError(
                f"weights version {version} in slot {slot} of relay `{self._name}` have digest "
                f"{blocks_digest}, the trainer's have {digest}: the bytes changed between the trainer and "
                "here. Stop the run and check the host's memory; the last checkpoint is not affected."
            )
        confirm(memory, slot, sequence, tensors_digest)
        return tensors_digest

    def _find(self, memory: Memory, version: int) -> tuple[int, int]:
        for slot in range(memory.slots):
            sequence = memory.sequence(slot)
            if memory.written(slot) and memory.version(slot) == version:
                return slot, sequence
        present = sorted(memory.version(slot) for slot in range(memory.slots) if memory.written(slot))
        raise UnknownVersionError(
            f"weights version {version} is in no slot of relay `{self._name}` (present: {present}): "
            "publish it, or stage the newest"
        )


def _readable(memory: Memory, version: int, digest: str) -> Fetched | None:
    """The version, if it is readable already and was published with `digest`."""
    if (place := memory.find(version)) is None:
        return None
    same = published_digest(read_manifest(memory, *place)) == digest
    return Fetched(memory.digest(place[0])) if same else None


class Storer:
    """Writes the newest requested version. It skips a version if a newer one is requested before the write
    begins. A write that hangs delays later writes and nothing else."""

    def __init__(self, directory: Directory, memory: Memory, *, anchor_every: int) -> None:
        self._directory, self._memory, self._anchor_every = directory, memory, anchor_every
        self._request, self._last = (-1, ""), Stored(-1, "")
        self._storing = BackgroundThread("store weights", self._store)

    def ask(self, version: int, digest: str) -> Stored:
        """Write this version next, unless it was written last. Returns how the last write ended."""
        if (version, digest) != (self._last.version, self._last.digest):
            self._request = version, digest
            self._storing.ask()
        return self._last

    def _store(self) -> None:
        version, digest = self._request
        if (version, digest) == (self._last.version, self._last.digest):
            return
        began = time.perf_counter()
        try:
            weights_bytes, written = self._write(version, digest)
        except Exception as error:
            self._last = Stored(version, digest, reason=reason_of(error))
        else:
            self._last = Stored(version, digest, weights_bytes, written, time.perf_counter() - began)

    def _write(self, version: int, digest: str) -> tuple[int, dict[str, int]]:
        """(bytes of the version, as `Directory.write` returns). Raises: MillraceError."""
        bases = {(base.version, base.digest): base for base in all_slot_weights(self._memory)}
        if (weights := bases.pop((version, digest), None)) is None:
            raise UnknownVersionError(f"weights version {version} is in no slot any more")
        every, keep = self._anchor_every, self._memory.slots
        written = self._directory.write(weights, bases.values(), anchor_every=every, keep=keep)
        return len(weights.data), written
