"""A relay's session: open the slots, then stage what the trainer published, or get it from other relays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from millrace.controller.context import RunContext
from millrace.controller.state.chain import Fetch
from millrace.controller.state.lineage import replay_difference
from millrace.core.errors import (
    DigestMismatchError,
    TornVersionError,
    UnknownVersionError,
    WeightsError,
    leaves,
)
from millrace.core.protocols import Handle
from millrace.core.types import Staged, Stored, VersionRecord

TICK_S = 1.0  # between two looks of a relay that nobody woke, and between two tries to get a version


class RelaySession:
    """Of the relay of one host. It makes versions pullable there: the head's from `run.published`, those of
    the others from the relays before them in the chain. When the relay dies its slots are no longer offered.
    A new head gets the current version from the trainer again, another relay gets the newest from others.
    It returns when the relay is no longer `needed`.

    Where the trainer is on several hosts, no head can stage alone. All relays get what they lack from others.
    The first one that has all of a version says what it is, and the rest are held to that."""

    def __init__(
        self,
        host: str,
        run: RunContext,
        slot_bytes: Callable[[], Awaitable[int]],
        needed: Callable[[], bool] = lambda: True,
    ) -> None:
        self._host, self._run, self._slot_bytes, self._needed = host, run, slot_bytes, needed
        self._head = run.state.relays[host].head
        self._parts = len(run.trainer_hosts) > 1
        self._call = run.patience.call
        self._misses = 0  # fetches in a row that got nothing

    async def run(self, handle: Handle) -> None:
        run = self._run
        run.state.relays.up(self._host, await self._call(handle, "open", await self._slot_bytes()))
        self._tell()
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._host == run.trainer_hosts[0] and run.config.weights.directory is not None:
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
        if self._head and self._run.published:  # by a trainer on this host alone
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
        self._hold_to_record(item.digest, staged)
        run.state.relays.staged(staged.version, staged.digest)
        self._holds(staged)
        run.waits.progress(handle.name)
        self._tell_staged(staged)
        self._tell()

    def _tell_staged(self, staged: Staged) -> None:
        self._run.repack_due = True
        self._run.events.emit("staged", version=staged.version, digest=staged.digest, stage_s=staged.stage_s)

    def _holds(self, staged: Staged) -> None:
        run = self._run
        run.state.relay_holds(self._host, staged.held, staged.past)
        for version, reason in sorted(staged.dropped.items()):
            run.events.emit("version_dropped", host=self._host, version=version, reason=reason)

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

    async def _unless_written_again(self, call: Awaitable[Staged]) -> Staged | None:
        """What `call` answers. None: a head that died is back, and the ranks wrote the version into it again.
        Relays that waited for the dead one may wait for each other by now. The next order takes over."""
        relays = self._run.state.relays
        before = relays.rewritten

        async def watch() -> None:
            while relays.rewritten == before:
                await self._run.to_relays.wait(timeout_s=TICK_S)
            asking.cancel()

        async def ask() -> Staged | Exception:
            try:
                return await call
            except Exception as error:  # a group that is closing would not undo its cancellation of this task
                return error

        async with asyncio.TaskGroup() as tasks:
            asking, watching = tasks.create_task(ask()), tasks.create_task(watch())
            asking.add_done_callback(lambda _: watching.cancel())
        answer = None if asking.cancelled() else asking.result()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _hold_to_record(self, published: str, staged: Staged) -> None:
        """The version, `published` with that digest, may have been published before: by a trainer that died,
        or in an earlier session. It is the same if its tensors are, whichever pieces its ranks had, or if its
        pieces are.

        Raises: DigestMismatchError: it was other weights, and nothing explains it.
        """
        run, now = self._run, VersionRecord(staged.version, staged.digest, self._run.arithmetic)
        earlier = run.ledger.published(now.version)
        known = {record.digest for record in earlier}
        why = "" if published in known else replay_difference(earlier, now)
        if now.digest not in known:
            run.ledger.publish(now)
        run.lineage.published(staged)
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
                got: Staged | None = await (self._unless_written_again(call) if self._parts else call)
        except DigestMismatchError:
            raise
        except WeightsError as error:
            relay.failing, relay.due, self._misses = True, -1, self._misses + 1
            run.state.relays.stored(fetch.version, False)
            run.events.emit("fetch_missed", host=self._host, version=fetch.version, reason=str(error))
            run.pulse.fire()
            return False
        if got is None:
            return True
        relay.failing, self._misses = False, 0
        relay.part = relay.part if relay.part > got.version else -1
        if self._parts:
            self._hold_to_record(digest, got)
        run.state.relays.arrived(self._host, got.version)
        self._holds(got)
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
        if self._parts and self._host == run.trainer_hosts[0]:
            self._tell_staged(got)
        self._tell()
        return True
