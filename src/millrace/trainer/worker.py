"""The trainer as a worker, whatever computes: a thin asynchronous shell around `BatchStep`.

Commands run one after another in a thread, so that the worker answers heartbeats meanwhile.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from msgspec.structs import replace

from millrace.config.objects import find_object
from millrace.config.schema import Config
from millrace.core.errors import (
    DataError,
    DigestMismatchError,
    TrainingError,
    WeightsError,
    WorkerError,
    boundary,
    needing_memory,
)
from millrace.core.protocols import WeightsWriter
from millrace.core.types import (
    Batch,
    CheckpointInfo,
    Endpoint,
    Published,
    StepRejected,
    StepResult,
    TrainerState,
    TrainGroup,
)
from millrace.trainer.batch.batch_step import BatchStep, impossible_trajectories
from millrace.trainer.files.directories import prune_checkpoints

T = TypeVar("T")
Policy = TypeVar("Policy", bound=BatchStep)

CHECKPOINTS = "checkpoints"  # beside the exported model, in the run directory


class TrainerWorker(ABC, Generic[Policy]):
    """`core.protocols.Trainer`. A subclass says how weights are loaded, published, saved and exported;
    in torch it is `trainer.role.TorchTrainer`.

    `config`: a whole configuration as plain data. `open_writer`: "package.module:function", called with
    an `Endpoint`, returns a `WeightsWriter`.
    """

    _trainer: Policy | None = None
    _saver: Any = None  # `result` and `wait` of the last checkpoint
    _publisher: Any = None  # and of the last publication
    _last: StepResult | None = None

    def __init__(self, config: dict[str, Any], run_dir: str, open_writer: str) -> None:
        self._config = Config.model_validate(config)
        self._run_dir = Path(run_dir)
        self._open_writer = find_object(open_writer, "`open_writer`")[0]
        self._turn = asyncio.Lock()
        self._writers: dict[Endpoint, WeightsWriter] = {}

    # ------------------------------------------------------------ of a backend

    @abstractmethod
    def _load(self, checkpoint: str | None) -> TrainerState: ...

    @abstractmethod
    def _publish(self, endpoints: Sequence[Endpoint]) -> None: ...

    @abstractmethod
    def _checkpoint(self, directory: str) -> None: ...

    @abstractmethod
    def _export(self, directory: str) -> None: ...

    @abstractmethod
    def _vocabulary(self) -> int:
        """Token ids are below this."""

    _prunes = True  # this process removes old checkpoints

    # ------------------------------------------------------------ commands

    async def load(self, checkpoint: str | None) -> TrainerState:
        return await self._run(lambda: self._load(checkpoint), "the model and its optimizer")

    async def step(self, batch: Batch) -> StepResult | StepRejected:
        num_tokens = sum(len(g.prompt) + len(s.columns) for g in batch.groups for s in g.sequences)
        activity = f"its step from version {batch.version} ({num_tokens} tokens)"
        return await self._run(lambda: self._step(batch), activity)

    async def publish(self, *endpoints: Endpoint) -> None:
        await self._run(lambda: self._publish(endpoints), "publishing")

    async def await_published(self) -> Published:
        """Without a turn: steps go on meanwhile."""
        return await asyncio.to_thread(_loaded(self._publisher).result)

    async def checkpoint(self, directory: str) -> None:
        await self._run(lambda: self._checkpoint(directory), "a checkpoint")

    async def await_saved(self, spared: Sequence[int] = ()) -> CheckpointInfo:
        """Without a turn: steps go on meanwhile."""
        info = await asyncio.to_thread(_loaded(self._saver).result)
        directory, keep = Path(info.path).parent, self._config.checkpoints.keep
        if self._prunes:
            await asyncio.to_thread(
                prune_checkpoints, directory, newest=info.version, keep=keep, spared=spared
            )
        return info

    async def export(self, directory: str) -> None:
        await self._run(lambda: self._export(directory), "exporting the model")

    async def _run(self, work: Callable[[], T], activity: str) -> T:
        advice = (
            f"Lower `batch.token_budget` ({self._config.batch.token_budget}), which changes no gradient, or "
            "free memory; then go on with `--resume`"
        )
        async with self._turn:
            with needing_memory("the trainer", activity, advice):
                return await asyncio.to_thread(work)

    # ------------------------------------------------------------ shared

    def _unload(self) -> None:
        """Wait for what is saved and published, and free the weights before others are loaded."""
        for work in filter(None, (self._saver, self._publisher)):
            work.wait()
        self._trainer = self._saver = self._publisher = self._last = None

    def _step(self, batch: Batch) -> StepResult | StepRejected:
        trainer = self._ready()
        if self._last is not None and batch.version == self._last.version - 1:
            return self._last
        if batch.version != trainer.version:
            raise DataError(
                f"a batch for version {batch.version} cannot be applied to the trainer's version "
                f"{trainer.version}: load the checkpoint it belongs to"
            )
        if bad := impossible_trajectories(batch, self._vocabulary()):
            reasons = "; ".join(f"trajectory {number}: {reason}" for number, reason in list(bad.items())[:4])
            return StepRejected(batch.version, list(bad), reasons, unfit=True)
        try:
            self._last = trainer.step(batch, rejected_dir=self._run_dir)
        except TrainingError as error:
            return StepRejected(batch.version, not_finite_trajectories(trainer, batch), str(error))
        except WeightsError as error:
            self._trainer = self._last = None  # these weights may not be trained, published or saved
            if isinstance(error, DigestMismatchError):
                raise
            ids = [s.trajectory_id for group in batch.groups for s in group.sequences]
            return StepRejected(batch.version, ids, str(error), weights_lost=True)
        return self._last

    def _refuse_changed(self, version: int) -> None:
        """Refuse to save weights that differ, in the published dtype, from the published `version`."""
        try:
            self._publisher.refuse_changed(version)
        except DigestMismatchError:
            self._trainer = None  # these weights may not be trained, published or saved
            raise

    def _writer_to(self, endpoint: Endpoint) -> WeightsWriter:
        """The open writer, or a new writer if the relay has moved."""
        if endpoint not in self._writers:
            while self._writers:
                self._writers.popitem()[1].close()
            with boundary("trainer", f"open the weight slots at {endpoint.path}", WeightsError):
                self._writers[endpoint] = self._open_writer(endpoint)
        return self._writers[endpoint]

    def _ready(self) -> Policy:
        return _loaded(self._trainer)


def _loaded(part: T | None) -> T:
    if part is None:
        raise WorkerError("the trainer has no weights yet: `load` must come first")
    return part


def not_finite_trajectories(trainer: BatchStep, batch: Batch) -> list[int]:
    """Ids of the trajectories that cannot be trained on alone, against the rest of their group. If every
    trajectory can, the ids of the whole batch.

    A pure function of weights and batch: a repeat names the same ids. The cost is a forward and backward pass
    over the batch, and a pass over the group for each trajectory of a group that fails.
    """
    groups = [group for group in batch.groups if not _trains(trainer, batch, group)]
    named = [
        sequence.trajectory_id
        for group in groups
        for sequence, alone in zip(group.sequences, _alone(group), strict=True)
        if sequence.num_trained and not _trains(trainer, batch, alone)
    ]
    return named or [s.trajectory_id for group in batch.groups for s in group.sequences]


def _alone(group: TrainGroup) -> Iterator[TrainGroup]:
    """The group once for each sequence. Every other sequence is masked, and still counts in the baseline."""
    for alone in group.sequences:
        sequences = [s if s is alone else replace(s, mask=[False] * len(s.columns)) for s in group.sequences]
        yield replace(group, sequences=sequences)


def _trains(trainer: BatchStep, batch: Batch, group: TrainGroup) -> bool:
    if not any(sequence.num_trained for sequence in group.sequences):
        return True
    try:
        trainer.measure(Batch(batch.version, [group]))
    except TrainingError:
        return False
    finally:
        trainer.forget_gradient()
    return True
