"""A simulated relay: slots for versions, and the time that staging and fetching take."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from millrace.core import clock
from millrace.core.errors import DigestMismatchError, UnknownVersionError, WeightsError
from millrace.core.progress import count
from millrace.core.types import Endpoint, Staged, Stored
from millrace_sim.costs.interface import CostModel, Costs
from millrace_sim.roles.world import SimulatedSlots, World
from millrace_sim.virtual.faults import pace

COUNT_S = 5.0  # between two counts of what arrives
BEGIN_S = 2.0  # a source may learn of the version shortly after the relay that asks


class SimRelay:
    """Holds the last `slots` versions in memory, which is lost with the relay. Relays of other
    hosts reach it at `address`."""

    def __init__(self, world: World, *, slots: int, costs: CostModel = Costs(), address: str = "") -> None:
        self._world, self._slots, self._costs = world, slots, costs
        self._address = address
        self._endpoint: Endpoint | None = None
        self._turn = asyncio.Lock()  # one fetch at a time

    async def open(self, slot_bytes: int) -> Endpoint:
        if self._endpoint is None:
            path = self._world.open_slots(self._slots)
            address = f"{self._address}:{path}" if self._address else ""
            if address:
                self._world.addresses[address] = path
            self._endpoint = Endpoint("sim", path, self._slots, slot_bytes, address)
        return self._endpoint

    async def stage(self, version: int, digest: str) -> Staged:
        slots, started = self._own_slots(), clock.now()
        slots.written(version)
        await asyncio.sleep(self._costs.stage_s * pace.get()())
        written = slots.written(version)
        if written != digest:
            raise DigestMismatchError(f"version {version}: the slot holds {written}, published was {digest}")
        slots.stage(version)
        return Staged(version=version, digest=written, versions=slots.versions, stage_s=clock.now() - started)

    async def fetch(self, version: int, digest: str, sources: list[str]) -> Staged:
        async with self._turn:
            slots, started = self._own_slots(), clock.now()
            source, received = "", 0
            if slots.arrives_s(version, digest, started) is None:
                source, received = (
                    await self._receive(slots, version, digest, sources),
                    self._costs.weights_bytes,
                )
            fetch_s = clock.now() - started
            return Staged(version, digest, slots.versions, fetch_s, source=source, received_bytes=received)

    async def _receive(self, slots: SimulatedSlots, version: int, digest: str, sources: Sequence[str]) -> str:
        """Receive from the first source that has the version, or is receiving it, and lives on. Returns its
        address."""
        answered = False
        for address in sources:
            at_s = await self._begins(address, version, digest)
            answered = answered or address in self._world.addresses
            if at_s is None:
                continue
            slots.begin_write(version)
            took_s = max(self._costs.fetch_s * pace.get()(), at_s + self._costs.hop_s - clock.now())
            slots.arriving[version] = clock.now() + took_s
            slots.news.fire()
            try:
                await self._receive_all(took_s)
            finally:
                del slots.arriving[version]
            if self._arrives_s(address, version, digest) == clock.now():
                self._keep(slots, version, digest)
                return address
        kind = UnknownVersionError if answered else WeightsError
        raise kind(f"version {version} cannot be fetched from {', '.join(sources) or 'nobody'}")

    async def _receive_all(self, took_s: float) -> None:
        """Bytes arrive all the time, unless this relay is stuck."""
        num_parts, pace_before = 1 + int(self._costs.fetch_s // COUNT_S), pace.get()()
        for _ in range(num_parts):
            await asyncio.sleep(took_s / num_parts * pace.get()() / pace_before)
            count()

    async def _begins(self, address: str, version: int, digest: str) -> float | None:
        """When the whole version can be here, if the relay at `address` has it or soon begins to receive
        it."""
        deadline_s = clock.now() + BEGIN_S
        while (at_s := self._arrives_s(address, version, digest)) is None and clock.now() < deadline_s:
            if address not in self._world.addresses:
                return None
            slots = self._world.slots_at(self._world.addresses[address])
            await slots.news.wait(timeout_s=deadline_s - clock.now())
        return at_s

    def _arrives_s(self, address: str, version: int, digest: str) -> float | None:
        path = self._world.addresses.get(address, "")
        return self._world.slots_at(path).arrives_s(version, digest, clock.now()) if path else None

    def _keep(self, slots: SimulatedSlots, version: int, digest: str) -> None:
        """The whole version is here: check its digest, and stage it."""
        written = self._world.written(digest)
        if written != digest:
            raise DigestMismatchError(f"version {version}: {written} has arrived, published was {digest}")
        slots.write(version, digest)
        slots.stage(version)

    def _own_slots(self) -> SimulatedSlots:
        assert self._endpoint is not None, "a command before open"
        return self._world.slots_at(self._endpoint.path)

    async def store(self, version: int, digest: str) -> Stored:
        return Stored(version, digest, reason="a simulated relay has no bytes to write")

    def reclaim(self) -> None:
        """The simulated runtime calls this when the process dies: its memory goes with it."""
        if self._endpoint is not None:
            slots = self._world.slots_by_path.pop(self._endpoint.path, None)
            self._world.addresses.pop(self._endpoint.address, None)
            if slots is not None:
                slots.news.fire()
