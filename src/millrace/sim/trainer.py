"""A simulated trainer: a version counter, and the time that its work takes."""

from __future__ import annotations

import asyncio
from collections import Counter

from millrace.core import clock
from millrace.core.errors import DataError, TrainingError
from millrace.core.types import (
    Batch,
    CheckpointInfo,
    Endpoint,
    Published,
    StepResult,
    TrainerState,
    TrainSequence,
)
from millrace.sim.costs import CostModel, Costs
from millrace.sim.faults import pace
from millrace.sim.world import World, digest_of


class SimTrainer:
    """Applies batches in order. Only what it saved in `world` survives it."""

    def __init__(self, world: World, *, costs: CostModel = Costs()) -> None:
        self._world, self._costs = world, costs
        self._version = -1
        self._last: StepResult | None = None
        self._turn = asyncio.Lock()  # one command at a time, as in a process with one model

    async def load(self, checkpoint: str | None) -> TrainerState:
        async with self._turn:
            await self._spend(self._costs.load_s)
            if checkpoint is not None and checkpoint not in self._world.checkpoints:
                raise DataError(f"no checkpoint at {checkpoint}; saved: {sorted(self._world.checkpoints)}")
            self._version = 0 if checkpoint is None else self._world.checkpoints[checkpoint]
            self._last = None
            return TrainerState(self._version, num_parameters=0, slot_bytes=self._costs.weights_bytes)

    async def step(self, batch: Batch) -> StepResult:
        async with self._turn:
            if self._last is not None and batch.version == self._last.version - 1:
                return self._last
            if batch.version != self._version:
                raise TrainingError(
                    f"a batch for version {batch.version}, but the trainer is at {self._version}"
                )
            started = clock.now()
            await self._spend(self._costs.train_s(_lengths(batch)))
            self._version += 1
            self._last = _result(batch, step_s=clock.now() - started)
            return self._last

    async def publish(self, endpoint: Endpoint) -> Published:
        async with self._turn:
            shelf, version = self._world.shelf(endpoint.path), self._version
            shelf.begin_write(version)
            await self._spend(self._costs.publish_s)
            shelf.write(version, digest_of(version))
            return Published(version, digest_of(version), self._costs.weights_bytes, self._costs.publish_s)

    async def checkpoint(self, directory: str) -> CheckpointInfo:
        async with self._turn:
            path = f"{directory}/v{self._version:08d}"
            await self._spend(self._costs.save_s)
            self._world.checkpoints[path] = self._version
            return CheckpointInfo(self._version, path, self._costs.save_s)

    async def export(self, directory: str) -> None:
        async with self._turn:
            await self._spend(self._costs.save_s)
            self._world.exports.append(directory)

    async def _spend(self, seconds: float) -> None:
        await asyncio.sleep(seconds * pace.get()())


def _lengths(batch: Batch) -> list[int]:
    return [len(group.prompt) + len(s.tokens) for group in batch.groups for s in group.sequences]


def _result(batch: Batch, step_s: float) -> StepResult:
    sequences: list[TrainSequence] = [s for group in batch.groups for s in group.sequences]
    staleness = Counter(batch.version - version for s in sequences for version in s.versions)
    reward = sum(s.reward for s in sequences) / len(sequences) if sequences else 0.0
    return StepResult(
        version=batch.version + 1,
        metrics={"loss": 0.0, "grad_norm": 1.0, "reward": reward},
        logprob_gap={lag: (0.0, 0.0, count) for lag, count in sorted(staleness.items())},
        trained_tokens=sum(sum(s.mask) for s in sequences),
        step_s=step_s,
    )
