"""A relay's session: open the slots, then stage what the trainer published, or get it from other relays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from millrace.controller.chain import Fetch
from millrace.controller.context import RunContext
from millrace.controller.lineage import replay_difference
from millrace.core.errors import (
    DigestMismatchError,
    TornVersionError,
    UnknownVersionError,
    WeightsError,
    leaves,
)
from millrace.core.protocols import Handle
from millrace.core.types import Published, Staged, Stored, VersionRecord

TICK_S = 1.0  # between two looks of a relay that nobody woke, and between two tries to get a version


class RelaySession:
    """Of the relay of one host. It makes versions pullable there: the head's from `run.published`, those of
    the others from the relays before them in the chain. When the relay dies its slots are no longer offered.
    A new head gets the current version from the trainer again, another relay gets the newest from others.
    It returns when the relay is no longer `needed`."""

    def __init__(
        self,
        host: str,
        run: RunContext,
        slot_bytes: Callable[[], Awaitable[int]],
        needed: Callable[[], bool] = lambda: True,
    ) -> None:
        self._host, self._run, self._slot_bytes, self._needed = host, run, slot_bytes, needed
        self._head = run.state.relays[host].head
        self._call = run.patience.call
        self._misses = 0  # fetches in a row that got nothing

    async def run(self, handle: Handle) -> None:
        run = self._run
        run.state.relays.up(self._host, await self._call(handle, "open", await self._slot_bytes()))
        self._tell()
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._head and run.config.weights.directory is not None:
                    tasks.create_task(self._store(handle), name=f"store {handle.name}")
                while self._needed():
                    if not await self._serve(handle):
                        await run.to_relays.wait(timeout_s=TICK_S)
        except BaseExceptionGroup as group:
            raise next(leaves(group)) from None
        finally:
            run.state.relays.down(self._host)
            if self._head:
                run.published.clear()
            self._tell()

    async def _serve(self, handle: Handle) -> bool:
        """Get one version to this host. Whether it may look for another at once."""
        if self._head and self._run.published:
            await self._stage(handle)
            return True
        fetch = self._run.state.next_fetch(self._host)
        return fetch is not None and await self._fetch(handle, fetch)

    def _tell(self) -> None:
        """What hosts hold has changed: for decisions, and for the relays after this one."""
        self._run.pulse.fire()
        self._run.to_relays.fire()

    async def _stage(self, handle: Handle) -> None:
        run, item = self._run, self._run.published.popleft()
        try:
            with run.waits.waiting(handle.name, f"the digest of version {item.version}", bounded=True):
                staged: Staged = await self._call(handle, "stage", item.version, item.digest)
        except (UnknownVersionError, TornVersionError) as error:
            # The slot was overwritten: by a newer version, or by a new trainer that publishes this version
            # again. `run.published` gets either when it is whole.
            run.events.emit("stage_missed", version=item.version, reason=str(error))
            return
        finally:
            run.state.relays.arrived(self._host, item.version)
        self._hold_to_record(item, staged)
        run.lineage.published(staged)
        run.state.relays.staged(staged.version, staged.digest)
        run.state.relay_holds(self._host, staged.held)
        run.repack_due = True
        run.waits.progress(handle.name)
        run.events.emit("staged", version=staged.version, digest=staged.digest, stage_s=staged.stage_s)
        self._tell()

    async def _store(self, handle: Handle) -> None:
        """Consumes staged versions, the newest only; waits for another one, and for the relay to have written
        the last; ends with the session. What cannot be written is told, and the next one tried."""
        run, told = self._run, (-1, "")
        while True:
            version = run.state.relays[self._host].newest
            if version >= 0 and told != (version, digest := run.lineage.digest(version)):
                last: Stored = await self._call(handle, "store", version, digest)
                if told != (last.version, last.digest):
                    told = last.version, last.digest
                    self._tell_stored(last)
            await run.to_relays.wait(timeout_s=TICK_S)

    def _tell_stored(self, last: Stored) -> None:
        run = self._run
        if last.reason:
            run.events.emit("store_missed", version=last.version, reason=last.reason)
            return
        run.state.relays.stored(last.version)
        run.events.emit(
            "stored",
            version=last.version,
            weights_bytes=last.weights_bytes,
            written=last.told,
            store_s=last.store_s,
        )
        run.to_relays.fire()

    def _hold_to_record(self, item: Published, staged: Staged) -> None:
        """The version may have been published before: by a trainer that died, or in an earlier session. It is
        the same if its tensors are, whichever pieces its ranks had, or if its pieces are.

        Raises: DigestMismatchError: it was other weights, and nothing explains it.
        """
        run, now = self._run, VersionRecord(staged.version, staged.digest, self._run.arithmetic)
        earlier = run.ledger.published(now.version)
        known = {record.digest for record in earlier}
        why = "" if item.digest in known else replay_difference(earlier, now)
        if now.digest not in known:
            run.ledger.publish(now)
        if why:
            run.events.emit(
                "replay_differs",
                version=now.version,
                digest=now.digest,
                published_before=earlier[-1].digest,
                reason=why,
            )

    async def _fetch(self, handle: Handle, fetch: Fetch) -> bool:
        """Whether it got it. A source that dies is the relay's to replace by the next of `fetch`."""
        run, relay = self._run, self._run.state.relays[self._host]
        asked = fetch.asked(self._misses)
        what = f"version {fetch.version} from {' or '.join(asked)}"
        try:
            with run.waits.waiting(handle.name, what, bounded=True):
                digest = run.lineage.digest(fetch.version)
                call = self._call(handle, "fetch", fetch.version, digest, list(asked), waits=True)
                got: Staged = await call
        except DigestMismatchError:
            raise
        except WeightsError as error:
            relay.failing, self._misses = True, self._misses + 1
            run.state.relays.stored(fetch.version, False)
            run.events.emit("fetch_missed", host=self._host, version=fetch.version, reason=str(error))
            run.pulse.fire()
            return False
        relay.failing, self._misses = False, 0
        run.state.relay_holds(self._host, got.held)
        run.waits.progress(handle.name)
        run.events.emit(
            "fetched",
            host=self._host,
            version=got.version,
            digest=got.digest,
            source=got.source,
            received_bytes=got.received_bytes,
            decoded_bytes=got.decoded_bytes,
            encodings=got.encodings,
            fetch_s=got.stage_s,
        )
        self._tell()
        return True
