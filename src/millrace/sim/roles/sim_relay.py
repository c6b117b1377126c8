"""A simulated relay: slots for versions, and the time that staging takes."""

from __future__ import annotations

import asyncio

from millrace.core import clock
from millrace.core.errors import DigestMismatchError
from millrace.core.types import Endpoint, Staged
from millrace.sim.costs.interface import CostModel, Costs
from millrace.sim.roles.world import World
from millrace.sim.virtual.faults import pace


class SimRelay:
    """Holds the last `slots` versions in memory, which is lost with the relay."""

    def __init__(self, world: World, *, slots: int, costs: CostModel = Costs()) -> None:
        self._world, self._slots, self._costs = world, slots, costs
        self._endpoint: Endpoint | None = None

    async def open(self, slot_bytes: int) -> Endpoint:
        if self._endpoint is None:
            path = self._world.open_shelf(self._slots)
            self._endpoint = Endpoint(kind="sim", path=path, slots=self._slots, slot_bytes=slot_bytes)
        return self._endpoint

    async def stage(self, version: int, digest: str) -> Staged:
        assert self._endpoint is not None, "stage before open"
        shelf, started = self._world.shelf(self._endpoint.path), clock.now()
        shelf.written(version)
        await asyncio.sleep(self._costs.stage_s * pace.get()())
        found = shelf.written(version)
        if found != digest:
            raise DigestMismatchError(f"version {version}: the slot holds {found}, published was {digest}")
        shelf.stage(version)
        return Staged(version=version, digest=found, held=shelf.held, stage_s=clock.now() - started)

    def reclaim(self) -> None:
        """The simulated runtime calls this when the process dies: its memory goes with it."""
        if self._endpoint is not None:
            self._world.shelves.pop(self._endpoint.path, None)
