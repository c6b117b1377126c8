"""The trainer of a run, and its standby: a second trainer that has started, and waits for its turn.

A start of a trainer does all that needs no weights: its process, imports, device and communicators. So when
the trainer dies, the standby only loads the checkpoint. Both are supervised alike. The one that died starts
again, and is the standby then.
"""

from __future__ import annotations

import asyncio
from functools import partial

from millrace.controller.context import RunContext
from millrace.controller.fault import is_workers
from millrace.controller.fleet.fleet import Fleet
from millrace.controller.supervisor import Supervisor, WorkerSpec
from millrace.controller.trainer_session import TICK_S, TrainerSession


class LiveTrainers:
    """`keep` returns when a trainer has done the last step."""

    def __init__(
        self, run: RunContext, fleet: Fleet, supervisor: Supervisor, session: TrainerSession
    ) -> None:
        self._run, self._fleet, self._supervisor, self._session = run, fleet, supervisor, session
        self._kept = set[str]()  # names of trainers whose supervision goes on

    async def keep(self) -> None:
        """Raises: the error of a trainer that another start would meet again; that of the last trainer."""
        if self._fleet.standby is None:
            await self._supervisor.keep(self._fleet.trainer, self._session.run)
            return
        async with asyncio.TaskGroup() as group:
            specs = self._fleet.trainer, self._fleet.standby
            keepers = [group.create_task(self._keep(spec), name=spec.name) for spec in specs]
            while not self._session.done:
                await self._run.pulse.wait(timeout_s=TICK_S)
            for keeper in keepers:
                keeper.cancel()

    async def _keep(self, spec: WorkerSpec) -> None:
        if spec is self._fleet.standby:
            await self._session.slot_bytes()  # two that start at once take longer
        session, turn = self._session, self._session.turn
        self._kept.add(spec.name)
        try:
            await self._supervisor.keep(spec, session.run, on_death=partial(session.died, spec.name))
        except Exception as error:
            self._kept.discard(spec.name)
            if not is_workers(error) or turn.holder == spec.name or not self._kept:
                raise
            warning = f"{spec.name} is given up, and the run goes on without a standby: {error}"
            self._run.events.emit("warned", source="trainer.standby", reason=warning)
