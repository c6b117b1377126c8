"""The replica on a device that is lent in shifts: it begins asleep."""

from __future__ import annotations

from typing import Any

from millrace.core.errors import WorkerError, needing_memory
from millrace.core.types import Endpoint, Served
from millrace.rollout.replica import EngineReplica


class SharedReplica(EngineReplica):
    """Arguments: as of `EngineReplica`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._asleep = True
        self._engine.sleep()

    async def sleep(self) -> None:
        async with self._pulling:
            self._asleep = True
            await self._alone(self._drop)

    async def wake(self) -> None:
        with needing_memory(self._name, "its weights and its cache, at waking", self._advice):
            await self._alone(self._engine.wake)
        self._asleep = False

    async def pull(self, version: int, endpoint: Endpoint) -> Served:
        if self._asleep:
            raise WorkerError(f"{self._name} is asleep: `wake` must come first")
        return await super().pull(version, endpoint)

    def _drop(self) -> None:
        """On the engine's thread."""
        self._engine.sleep()
        self._recheck_due_s = float("inf")
        self._load = self._measured_load()


class Sleepless:
    """Of an engine without `rollout.colocated` in its settings."""

    def sleep(self) -> None:
        raise WorkerError(f"{type(self).__name__} cannot sleep: `rollout.colocated` needs another engine")

    def wake(self) -> None:
        """It is awake."""
