"""A relay's session: open the slots, then stage versions of the trainer, or fetch them from other relays."""

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

TICK_S = 1.0  # between two looks for work without a pulse, and between two tries to fetch a version


class RelaySession:
    """The session of the relay of one host. It makes versions pullable there. The root relay stages them from
    `RunContext.to_stage`; the other relays fetch them from relays before them in the chain. When the relay
    dies its slots are no longer offered. The trainer writes the current version into a new root relay again.
    Any other new relay fetches the newest version. The session returns when the relay is no longer `needed`.

    If the trainer is on several hosts, no root relay can stage alone: every relay fetches the blocks that it
    lacks. The first relay with a complete version records its digest, and the others must have the same."""

    def __init__(
        self,
        host: str,
        run: RunContext,
        slot_bytes: Callable[[], Awaitable[int]],
        needed: Callable[[], bool] = lambda: True,
    ) -> None:
        self._host, self._run, self._slot_bytes, self._needed = host, run, slot_bytes, needed
        self._is_root = run.state.relays[host].root
        self._several_roots = len(run.trainer_hosts) > 1
        self._call = run.patience.call
        self._misses = 0  # fetches in a row that staged nothing

    async def run(self, handle: Handle) -> None:
        run = self._run
        run.state.relays.up(self._host, await self._call(handle, "open", await self._slot_bytes()))
        self._wake_all()
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
            if self._is_root:
                run.to_stage.clear()
            self._wake_all()

    async def _serve(self, handle: Handle) -> bool:
        """Get one version to this host. Returns whether the relay may look for another at once."""
        if self._is_root and self._run.to_stage:  # only this host has ranks of the trainer
            await self._stage(handle)
            return True
        fetch = self._run.state.next_fetch(self._host)
        return fetch is not None and await self._fetch(handle, fetch)

    def _wake_all(self) -> None:
        """The versions on this host have changed: wake the decisions and the relays after this one."""
        self._run.pulse.fire()
        self._run.to_relays.fire()

    async def _stage(self, handle: Handle) -> None:
        run, item = self._run, self._run.to_stage.popleft()
        try:
            with run.waits.waiting(handle.name, f"the digest of version {item.version}", bounded=True):
                staged: Staged = await self._call(handle, "stage", item.version, item.digest)
        except (UnknownVersionError, TornVersionError) as error:
            # The slot was overwritten: by a newer version, or by a new trainer that publishes this version
            # again. `run.to_stage` gets that version once it is complete.
            run.events.emit("stage_missed", version=item.version, reason=str(error))
            return
        finally:
            run.state.relays.arrived(self._host, item.version)
        self._check_record(item.digest, staged)
        run.state.relays.staged(staged.version, staged.digest)
        self._note_versions(staged)
        run.waits.progress(handle.name)
        self._emit_staged(staged)
        self._wake_all()

    def _emit_staged(self, staged: Staged) -> None:
        self._run.repack_due = True
        self._run.events.emit("staged", version=staged.version, digest=staged.digest, stage_s=staged.stage_s)

    def _note_versions(self, staged: Staged) -> None:
        run = self._run
        run.state.relays.set_versions(self._host, staged.versions, staged.delta_versions)
        for version, reason in sorted(staged.dropped.items()):
            run.events.emit("version_dropped", host=self._host, version=version, reason=reason)

    async def _store(self, handle: Handle) -> None:
        """Consumes staged versions, the newest only; waits for the next version, and until the relay has
        written the last one; ends with the session. A write that fails is reported, and the next one
        tried."""
        run, reported = self._run, (-1, "")
        while True:
            version = run.state.relays[self._host].newest
            if version >= 0 and reported != (version, digest := run.lineage.digest(version)):
                last: Stored = await self._call(handle, "store", version, digest)
                if reported != (last.version, last.digest):
                    reported = last.version, last.digest
                    self._emit_stored(last)
            await run.to_relays.wait(timeout_s=TICK_S)

    def _emit_stored(self, last: Stored) -> None:
        run = self._run
        if last.reason:
            run.events.emit("store_missed", version=last.version, reason=last.reason)
            return
        run.state.relays.note_stored(last.version)
        run.events.emit(
            "stored",
            version=last.version,
            weights_bytes=last.weights_bytes,
            written=last.written,
            store_s=last.store_s,
        )
        run.to_relays.fire()

    async def _unless_written_again(self, call: Awaitable[Staged]) -> Staged | None:
        """The answer of `call`. None: a root relay restarted, and the ranks wrote the version into it again.
        Relays that waited for the dead relay may wait for each other by now. The next fetch replaces
        `call`."""
        relays = self._run.state.relays
        before = relays.rewritten

        async def watch() -> None:
            while relays.rewritten == before:
                await self._run.to_relays.wait(timeout_s=TICK_S)
            answering.cancel()

        async def answered() -> Staged | Exception:
            try:
                return await call
            except Exception as error:  # a group that is closing would not undo its cancellation of this task
                return error

        async with asyncio.TaskGroup() as tasks:
            answering, watching = tasks.create_task(answered()), tasks.create_task(watch())
            answering.add_done_callback(lambda _: watching.cancel())
        answer = None if answering.cancelled() else answering.result()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _check_record(self, published_digest: str, staged: Staged) -> None:
        """The version of `published_digest` may have been published before: by a trainer that died,
        or in an earlier session. The weights are the same if the tensors are, or if the blocks of the ranks
        are.

        Raises: DigestMismatchError: the weights differ, and nothing explains the difference.
        """
        run, now = self._run, VersionRecord(staged.version, staged.digest, self._run.arithmetic)
        earlier = run.ledger.version_records(now.version)
        digests = {record.digest for record in earlier}
        reason = "" if published_digest in digests else replay_difference(earlier, now)
        if now.digest not in digests:
            run.ledger.record_version(now)
        run.lineage.note_digest(staged)
        if reason:
            run.events.emit(
                "replay_differs",
                version=now.version,
                digest=now.digest,
                published_before=earlier[-1].digest,
                reason=reason,
            )

    async def _fetch(self, handle: Handle, fetch: Fetch) -> bool:
        """Returns whether the relay may look for another version at once. If a source dies, the relay goes on
        with the next source of `fetch`."""
        run, relay = self._run, self._run.state.relays[self._host]
        sources = fetch.sources_after(self._misses)
        what = f"version {fetch.version} from {' or '.join(sources)}"
        try:
            with run.waits.waiting(handle.name, what, bounded=True):
                digest = run.lineage.digest(fetch.version)
                call = self._call(handle, "fetch", fetch.version, digest, list(sources))
                staged: Staged | None = await (
                    self._unless_written_again(call) if self._several_roots else call
                )
        except DigestMismatchError:
            raise
        except WeightsError as error:
            relay.failing, relay.staging_version, self._misses = True, -1, self._misses + 1
            run.state.relays.note_stored(fetch.version, is_there=False)
            run.events.emit("fetch_missed", host=self._host, version=fetch.version, reason=str(error))
            run.pulse.fire()
            return False
        if staged is None:
            return True
        relay.failing, self._misses = False, 0
        relay.incomplete = relay.incomplete if relay.incomplete > staged.version else -1
        if self._several_roots:
            self._check_record(digest, staged)
        run.state.relays.arrived(self._host, staged.version)
        self._note_versions(staged)
        run.waits.progress(handle.name)
        run.events.emit(
            "fetched",
            host=self._host,
            version=staged.version,
            digest=staged.digest,
            source=staged.source,
            received_bytes=staged.received_bytes,
            decoded_bytes=staged.decoded_bytes,
            encodings=staged.encodings,
            fetch_s=staged.stage_s,
        )
        if self._several_roots and self._host == run.trainer_hosts[0]:
            self._emit_staged(staged)
        self._wake_all()
        return True
