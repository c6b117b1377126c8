"""A simulated trainer: a version counter, and the time that its work takes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from millrace.core import clock
from millrace.core.errors import DataError, TrainingError, WorkerError
from millrace.core.progress import CallProgress, waiting_for
from millrace.core.types import (
    Batch,
    CheckpointInfo,
    Endpoint,
    Published,
    StepRejected,
    StepResult,
    TrainerState,
    TrainSequence,
)
from millrace_sim.costs.interface import CostModel, Costs
from millrace_sim.roles.world import History, SimulatedSlots, World
from millrace_sim.virtual.faults import pace


@dataclass
class _Copy:
    """A version in a slot, digested from `digested_s` on."""

    endpoint: Endpoint
    published: Published
    slots: SimulatedSlots
    digested_s: float
    whole: bool = False
    progress: CallProgress = field(default_factory=lambda: CallProgress("await_published"))


class SimTrainer:
    """Applies batches in order. Only its checkpoints in `world` survive it."""

    def __init__(self, world: World, *, costs: CostModel = Costs()) -> None:
        self._world, self._costs = world, costs
        self._weights: History | None = None
        self._saving: tuple[str, History] | None = None  # the path of a checkpoint, and what is saved
        self._last: StepResult | None = None
        self._copy: _Copy | None = None
        self._asleep = False
        self._turn = asyncio.Lock()  # one command at a time, as in a process with one model

    async def load(self, checkpoint: str | None) -> TrainerState:
        async with self._turn:
            await self._spend(self._costs.load_s)
            if checkpoint is not None and checkpoint not in self._world.checkpoints:
                raise DataError(f"no checkpoint at {checkpoint}; saved: {sorted(self._world.checkpoints)}")
            self._weights = History() if checkpoint is None else self._world.checkpoints[checkpoint]
            self._last = self._copy = None
            return TrainerState(self._weights.version, self._costs.weights_bytes, arithmetic="exact")

    async def step(self, batch: Batch) -> StepResult | StepRejected:
        async with self._turn:
            if self._last is not None and batch.version == self._last.version - 1:
                return self._last
            weights = self._loaded()
            if batch.version != weights.version:
                raise TrainingError(
                    f"a batch for version {batch.version}, but the trainer is at {weights.version}"
                )
            started = clock.now()
            self._world.training = True
            try:
                await self._spend(self._costs.train_s(_lengths(batch)))
            finally:
                self._world.training = False
            if poison := [s.trajectory_id for s in _sequences(batch) if self._world.poisons(s.trajectory_id)]:
                return StepRejected(batch.version, poison, f"step {batch.version}: the loss is nan")
            await self._digested()
            self._weights = weights.after(batch)
            self._last = _result(batch, step_s=clock.now() - started)
            return self._last

    async def publish(self, *endpoints: Endpoint) -> None:
        async with self._turn:
            await self._digested()
            weights, costs = self._loaded(), self._costs
            (endpoint,) = endpoints  # it simulates a trainer of one host
            if self._is_repeat(endpoint, weights.version):
                return
            slots = self._world.slots_at(endpoint.path)
            slots.begin_write(weights.version)
            await self._spend(costs.publish_s)
            published = Published(
                weights.version, weights.digest, costs.weights_bytes, costs.publish_s, costs.digest_s
            )
            digested_s = clock.now() + costs.digest_s * pace.get()()
            self._copy = _Copy(endpoint, published, slots, digested_s)

    def _is_repeat(self, endpoint: Endpoint, version: int) -> bool:
        """Whether the slot has the version already. Writing it again would tear it for its readers."""
        copy = self._copy
        return copy is not None and (copy.endpoint, copy.published.version) == (endpoint, version)

    async def await_published(self) -> Published:
        """Steps go on meanwhile."""
        copy = self._copy
        assert copy is not None, "nothing was published"
        await self._digested()
        return copy.published

    async def _digested(self) -> None:
        """Wait for the digest, for which updates wait too."""
        if (copy := self._copy) is None:
            return
        with waiting_for(copy.progress):
            await asyncio.sleep(copy.digested_s - clock.now())
        if not copy.whole:
            copy.whole = True
            copy.slots.write(copy.published.version, self._world.written(copy.published.digest))

    async def checkpoint(self, directory: str) -> None:
        async with self._turn:
            weights = self._loaded()
            await self._digested()  # what is saved is compared with it
            await self._spend(self._costs.snapshot_s)
            self._saving = f"{directory}/v{weights.version:08d}", weights

    async def await_saved(self, spared: Sequence[int] = ()) -> CheckpointInfo:
        """Steps go on meanwhile."""
        assert self._saving is not None, "no checkpoint was begun"
        path, weights = self._saving
        await self._spend(self._costs.save_s)
        self._world.checkpoints[path] = weights
        return CheckpointInfo(weights.version, path, self._costs.save_s, self._costs.snapshot_s)

    async def export(self, directory: str) -> None:
        async with self._turn:
            await self._spend(self._costs.save_s)
            self._world.exports[directory] = self._loaded()

    async def sleep(self) -> None:
        async with self._turn:
            await self._digested()
            if not self._asleep:
                await self._spend(self._costs.sleep_s)
            self._asleep = True
            self._world.release(self)

    async def wake(self) -> None:
        async with self._turn:
            self._world.hold(self, "trainer")
            if self._asleep:
                await self._spend(self._costs.wake_s)
            self._asleep = False

    def reclaim(self) -> None:
        """Its process is dead."""
        self._world.release(self)

    def _loaded(self) -> History:
        if self._asleep:
            raise WorkerError("the trainer is asleep: `wake` must come first")
        if self._weights is None:
            raise TrainingError("the trainer has no weights yet: `load` must come first")
        return self._weights

    async def _spend(self, seconds: float) -> None:
        await asyncio.sleep(seconds * pace.get()())


def _sequences(batch: Batch) -> list[TrainSequence]:
    return [s for group in batch.groups for s in group.sequences]


def _lengths(batch: Batch) -> list[int]:
    return [len(group.prompt) + len(s.columns) for group in batch.groups for s in group.sequences]


def _result(batch: Batch, step_s: float) -> StepResult:
    sequences = _sequences(batch)
    staleness = Counter[int]()
    for sequence in sequences:
        for version, count in sequence.columns.sampled_runs:
            staleness[batch.version - version] += count
    reward = sum(s.reward for s in sequences) / len(sequences) if sequences else 0.0
    return StepResult(
        version=batch.version + 1,
        metrics={"loss": 0.0, "grad_norm": 1.0, "reward": reward},
        logprob_gap={behind: (0.0, 0.0, count) for behind, count in sorted(staleness.items())},
        trained_tokens=sum(s.num_trained for s in sequences),
        step_s=step_s,
    )
