"""The relay: owns the memory of published weights on one host, and verifies what is in it."""

from __future__ import annotations

import asyncio
import os
import time

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
from millrace.weights.layout import Memory, create
from millrace.weights.manifest import check_sequence, digest_slot, read_manifest
from millrace.weights.slots import confirm
from millrace.weights.store.directory import Directory
from millrace.weights.store.history import OlderVersions
from millrace.weights.store.restoring import restore
from millrace.weights.store.storing import Storer


class RelayWorker:
    """Role `millrace.weights.relay:RelayWorker` (a core.protocols.Relay).

    Args:
        name: shown in errors.
        slots: versions held whole at the same time, at least 2: one readable, one being written.
        versions: held at all; those beyond `slots` as deltas, in half a slot together.
        address: of this host, where it listens for the relays of other hosts; empty: nowhere.
        secret: of the run, which the relays prove to each other.
        transport: of raw chunks between hosts: "tcp", or "nixl".
        deadlines: how long it waits for other relays.
        directory: where it stores versions, a URL; None: nowhere. Every `anchor_every`th is whole.
        owner: the run, as that directory knows it.
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
        self._address, self._secret, self._deadlines = address, secret, deadlines
        self._transport = transport
        self._directory, self._anchor_every, self._owner = directory, anchor_every, owner
        self._lock, self._restoring = asyncio.Lock(), asyncio.Lock()
        self._storer: Storer | None = None
        self._fd = -1
        self._memory: Memory | None = None
        self._past: OlderVersions | None = None
        self._network: Network | None = None

    async def open(self, slot_bytes: int) -> Endpoint:
        """Allocate the slots, every page of them, and say where they are. Idempotent.

        Raises:
            WeightsError: open already with another size, or the memory or the address cannot be had.
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
        """Digest what the trainer wrote and, if it equals the trainer's own `digest`, make it readable.

        `digest` is of the pieces that the trainer's processes wrote. The one that is returned is of whole
        tensors, as replicas take it. A trainer of one process writes whole tensors: the two are the same.

        Staging a staged version again confirms it without reading it again.

        Raises:
            UnknownVersionError: not in any slot (never published, or already overwritten).
            TornVersionError: overwritten while it was digested.
            DigestMismatchError: the bytes here are not those that the trainer digested.
        """
        started = time.perf_counter()
        async with self._lock:
            memory = self._opened()
            read = await asyncio.to_thread(self._stage, memory, version, digest)
            if self._network is not None:
                self._network.staged()
            return self._staged(Staged(version, read, memory.held(), time.perf_counter() - started))

    async def fetch(self, version: int, digest: str, sources: list[str]) -> Staged:
        """Get `version`, published with `digest`, from the first of the relays at `sources` (HOST:PORT) that
        has it or receives it, and make it readable. Other relays may have what is here of it meanwhile. Where
        no relay can help, it is read from those of `sources` that are directories (URLs).

        Idempotent: only what lacks is asked for. A later call for the same version takes over from the
        present one, which raises WeightsError. What another digest was fetched with is replaced.

        Raises:
            UnknownVersionError: no source has it.
            TornVersionError: its slot was taken for another version meanwhile.
            DigestMismatchError: what arrived is not what was published.
            WeightsError: no source answers, or this relay has no address.
        """
        started = time.perf_counter()
        memory = self._opened()
        got = await asyncio.to_thread(_readable, memory, version, digest)
        if got is None:
            if self._past is not None and version in memory.held():
                self._past.forget(version)  # it was made again
            with boundary(f"relay `{self._name}`", f"fetching version {version}", WeightsError):
                got = await self._fetched(memory, version, digest, sources)
        fetch_s = time.perf_counter() - started
        return self._staged(
            Staged(
                version,
                got.digest,
                memory.held(),
                fetch_s,
                got.source,
                got.received_bytes,
                got.decoded_bytes,
                got.encodings,
            )
        )

    async def store(self, version: int, digest: str) -> Stored:
        """Write a readable version, published with `digest`, to the directory, in a thread of its own.
        Returns at once, how the last one ended. Idempotent.

        Raises: ConfigError: the directory cannot be used. WeightsError: this relay has none.
        """
        if self._storer is None:
            if self._directory is None:
                raise WeightsError(f"relay `{self._name}` has no directory to store versions in")
            place = await asyncio.to_thread(Directory, self._directory, self._owner)
            self._storer = self._storer or Storer(place, self._opened(), anchor_every=self._anchor_every)
        return self._storer.ask(version, digest)

    def close(self) -> None:
        """Stop to listen and to serve other hosts. Readers here read on. Idempotent."""
        if self._network is not None:
            self._network.close()

    async def _fetched(self, memory: Memory, version: int, digest: str, sources: list[str]) -> Fetched:
        async with self._restoring:
            pass  # until nothing is written into the slot that this may take
        relays = [source for source in sources if "://" not in source]
        places = [source for source in sources if "://" in source]
        failed: WeightsError | None = None
        if self._network is not None and (relays or not places):  # ranks of this host may have all of it
            try:
                return await self._network.fetch(version, digest, relays)
            except DigestMismatchError:
                raise
            except WeightsError as error:
                failed = error
        elif relays:
            failed = WeightsError(f"relay `{self._name}` has no address, so it cannot ask {relays}")
        for place in places:
            try:
                return await self._restored(memory, version, digest, place)
            except WeightsError as error:
                failed = type(error)(f"{failed}; {error}") if failed else error
        raise failed or WeightsError(f"version {version} cannot be fetched: no source was named")

    async def _restored(self, memory: Memory, version: int, digest: str, place: str) -> Fetched:
        directory = await asyncio.to_thread(Directory, place)
        await self._restoring.acquire()
        running = asyncio.get_running_loop()
        writing = running.run_in_executor(None, restore, directory, memory, version, digest)
        writing.add_done_callback(self._has_written)
        num_bytes = await asyncio.shield(writing)
        if self._network is not None:
            self._network.staged()
        got = _readable(memory, version, digest)
        if got is None:
            raise TornVersionError(f"the slot of version {version} was taken when it had been read")
        return replace(got, source=place, received_bytes=num_bytes)

    def _has_written(self, writing: asyncio.Future[int]) -> None:
        """No thread can be stopped, so a cancelled restore's slot is not free before this."""
        self._restoring.release()
        writing.cancelled() or writing.exception()  # nobody may wait for it any more

    def _staged(self, staged: Staged) -> Staged:
        """With what is kept as deltas, which the newest version may add to."""
        if self._past is None:
            return staged
        self._past.keeping.ask()
        past, dropped = self._past.versions(), self._past.take_dropped()
        return replace(staged, held=sorted({*staged.held, *past}), past=past, dropped=dropped)

    def _opened(self) -> Memory:
        if self._memory is None:
            raise WeightsError(f"relay `{self._name}` is not open: call `open` with the bytes of a version")
        return self._memory

    def _allocate(self, slot_bytes: int) -> None:
        if slot_bytes < 1:
            raise WeightsError(f"relay `{self._name}`: a version of {slot_bytes} bytes cannot be held")
        try:
            self._fd, memory = create(self._slots, slot_bytes)
        except OSError as error:
            raise WeightsError(
                f"relay `{self._name}` cannot have {self._slots} slots of {slot_bytes} bytes ({error}): "
                "lower `weights.slots` or free host memory"
            ) from error
        memory.fill()
        if self._versions > self._slots:
            self._past = OlderVersions(
                memory, self._fd, bytes_max=slot_bytes // 2, versions_max=self._versions - 1
            )
        if self._address:
            self._network = Network(
                self._name,
                memory,
                address=self._address,
                secret=self._secret,
                deadlines=self._deadlines,
                transport=self._transport,
            )
        self._memory = memory

    def _stage(self, memory: Memory, version: int, digest: str) -> str:
        slot, sequence = self._find(memory, version)
        if self._past is not None:
            self._past.forget(version)
        manifest = read_manifest(memory, slot, sequence)
        if absent := sum(piece.absent for spec in manifest for piece in spec.pieces):
            raise UnknownVersionError(
                f"of weights version {version}, {absent} pieces were written on other hosts: relay "
                f"`{self._name}` must fetch these"
            )
        if memory.complete(slot):
            read, found = memory.digest(slot), published_digest(manifest)
        else:
            read, found = digest_slot(memory, slot, manifest)
        check_sequence(memory, slot, sequence)
        if found != digest:
            raise DigestMismatchError(
                f"weights version {version} in slot {slot} of relay `{self._name}` have digest {found}, the "
                f"trainer's have {digest}: the bytes changed between the trainer and here. Stop the run and "
                "check the host's memory; the last checkpoint is not affected."
            )
        confirm(memory, slot, sequence, read)
        return read

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
    """A version that can be read already and was published with `digest`."""
    if (place := memory.find(version)) is None:
        return None
    same = published_digest(read_manifest(memory, *place)) == digest
    return Fetched(memory.digest(place[0])) if same else None
