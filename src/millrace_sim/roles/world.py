"""State that outlives a simulated process: the slots of the relays and the disk.

All roles of a run share one `World`, which each gets as a constructor argument.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import xxhash

from millrace.core.errors import UnknownVersionError
from millrace.core.pulse import Pulse
from millrace.core.types import Batch
from millrace_sim.virtual.faults import Corruption
from millrace_sim.virtual.seeded import stream


@dataclass(frozen=True, slots=True)
class History:
    """Simulated weights are the history of their training. Equal histories have equal digests.

    `trained` has the trajectory ids of each step.
    """

    version: int = 0
    digest: str = "sim-0"
    trained: tuple[tuple[int, ...], ...] = ()

    def after(self, batch: Batch) -> History:
        """The weights after one more optimizer step."""
        sequences = [s for group in batch.groups for s in group.sequences]
        learned = [
            (s.trajectory_id, len(s.columns), [version for version, _ in s.columns.runs[-1:]], s.reward)
            for s in sequences
        ]
        history = xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode((self.digest, learned)))
        ids = tuple(s.trajectory_id for s in sequences)
        return History(self.version + 1, f"sim-{self.version + 1}-{history}", (*self.trained, ids))


class SimulatedSlots:
    """The slots of one relay. A version is written into a slot, then staged, later overwritten."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._written: dict[int, str] = {}  # version -> digest
        self._staged: set[int] = set()
        self.arriving: dict[int, float] = {}  # version from another host -> when all of it will be here
        self.news = Pulse()  # fires at a new version, at its arrival, and at the end of the relay

    @property
    def versions(self) -> list[int]:
        """Complete versions, oldest first."""
        return sorted(self._staged)

    def begin_write(self, version: int) -> None:
        """Tear the slot of `version`, or the slot of the oldest version if no slot is free."""
        if version not in self._written and len(self._written) == self._slots:
            self._tear(min(self._written))
        self._tear(version)

    def write(self, version: int, digest: str) -> None:
        self._written[version] = digest

    def _tear(self, version: int) -> None:
        self._written.pop(version, None)
        self._staged.discard(version)

    def written(self, version: int) -> str:
        """Raises: UnknownVersionError."""
        if version not in self._written:
            raise UnknownVersionError(f"version {version} was not written; slots hold {list(self._written)}")
        return self._written[version]

    def stage(self, version: int) -> None:
        self._staged.add(version)
        self.news.fire()

    def arrives_s(self, version: int, digest: str, now_s: float) -> float | None:
        """When the whole version is here for other relays; None: it is neither here nor arriving."""
        if version in self._staged and self._written[version] == digest:
            return now_s
        return self.arriving.get(version)

    def staged(self, version: int) -> str:
        """Raises: UnknownVersionError."""
        if version not in self._staged:
            raise UnknownVersionError(f"version {version} is not held; held: {self.versions}")
        return self._written[version]


class World:
    """Slots by endpoint path, checkpoints and exports by path. `num_corrupted` counts corrupted copies.
    `training`: a trainer computes. `overlaps`: how often both sides held a device that is lent in turns."""

    def __init__(
        self, *, seed: int = 0, corruption: Corruption = Corruption(), poisonous: float = 0.0
    ) -> None:
        self.slots_by_path: dict[str, SimulatedSlots] = {}
        self.addresses: dict[str, str] = {}  # of relays: address -> path of their slots
        self.checkpoints: dict[str, History] = {}
        self.exports: dict[str, History] = {}
        self.num_corrupted = 0
        self.training = False
        self.overlaps = 0
        self._holders: dict[object, str] = {}  # workers that hold memory of the device, and their sides
        self._opened = 0
        self._seed, self._poisonous = seed, poisonous
        self._corruption, self._rng = corruption, stream(seed, "corruption")

    def hold(self, worker: object, side: str) -> None:
        """`worker` takes memory of the device that is lent in turns."""
        self._holders[worker] = side
        self.overlaps += len(set(self._holders.values())) > 1

    def release(self, worker: object) -> None:
        """`worker` sleeps, or is dead. Idempotent."""
        self._holders.pop(worker, None)

    def written(self, digest: str) -> str:
        """The digest of a slot after weights with `digest` were copied into it."""
        return self._perhaps_corrupted(digest, self._corruption.written)

    def read(self, digest: str) -> str:
        """The digest of a replica's copy of a slot with `digest`."""
        return self._perhaps_corrupted(digest, self._corruption.read)

    def _perhaps_corrupted(self, digest: str, probability: float) -> str:
        if not probability or self._rng.random() >= probability:
            return digest
        self.num_corrupted += 1
        return f"{digest} with a flipped bit"

    def poisons(self, trajectory_id: int) -> bool:
        """Whether no batch with this trajectory can be trained on."""
        if not self._poisonous:
            return False
        return stream(self._seed, "poison", trajectory_id).random() < self._poisonous

    def open_slots(self, num_slots: int) -> str:
        """Opens slots and returns their path, which no earlier slots had."""
        self._opened += 1
        path = f"sim/slots-{self._opened}"
        self.slots_by_path[path] = SimulatedSlots(num_slots)
        return path

    def slots_at(self, path: str) -> SimulatedSlots:
        """Raises: UnknownVersionError: the relay of these slots is gone."""
        if path not in self.slots_by_path:
            raise UnknownVersionError(f"nothing is open at {path}: the relay that opened it is gone")
        return self.slots_by_path[path]
