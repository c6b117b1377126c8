"""The relay's session: open the slots, then stage what the trainer published."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from millrace.controller.context import RunContext
from millrace.core.errors import TornVersionError, UnknownVersionError
from millrace.core.protocols import Handle
from millrace.core.types import Staged

TICK_S = 1.0


class RelaySession:
    """Consumes `run.published`; produces pullable versions. When the relay dies its slots are no longer
    offered; a new one gets the current version from the trainer again."""

    def __init__(self, run: RunContext, slot_bytes: Callable[[], Awaitable[int]]) -> None:
        self._run, self._slot_bytes = run, slot_bytes
        self._call = run.patience.call

    async def run(self, handle: Handle) -> None:
        run = self._run
        run.endpoint = await self._call(handle, "open", await self._slot_bytes())
        run.pulse.fire()
        try:
            while True:
                if run.published:
                    await self._stage(handle)
                else:
                    await run.to_stage.wait(timeout_s=TICK_S)
        finally:
            run.endpoint = None
            run.state.relay_holds(())
            run.published.clear()
            run.pulse.fire()

    async def _stage(self, handle: Handle) -> None:
        run, item = self._run, self._run.published.popleft()
        try:
            with run.waits.waiting("relay", f"the digest of version {item.version}", bounded=True):
                staged: Staged = await self._call(handle, "stage", item.version, item.digest)
        except (UnknownVersionError, TornVersionError) as error:
            # The slot was overwritten: by a newer version, or by a new trainer that publishes this version
            # again. `run.published` gets either when it is whole.
            run.events.emit("stage_missed", version=item.version, reason=str(error))
            return
        run.lineage.published(staged)
        run.state.relay_holds(staged.held)
        run.waits.progress(handle.name)
        run.events.emit("staged", version=staged.version, digest=staged.digest, stage_s=staged.stage_s)
        run.pulse.fire()
