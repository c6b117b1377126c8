"""The trainer as a worker: a thin asynchronous shell around `PolicyTrainer`.

Commands run one after another in a thread, so that the worker answers heartbeats meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from millrace.algorithms import of_run
from millrace.config.schema import Config
from millrace.core import model_version
from millrace.core.errors import (
    DataError,
    DigestMismatchError,
    TrainingError,
    WeightsError,
    WorkerError,
    boundary,
    needing_memory,
)
from millrace.core.objects import find_object
from millrace.core.protocols import WeightsWriter
from millrace.core.types import (
    Batch,
    CheckpointInfo,
    Endpoint,
    Published,
    StepRejected,
    StepResult,
    TrainerState,
)
from millrace.devices.device import computes, computing_dtype, torch_device
from millrace.placement.needs import teacher_of
from millrace.trainer.adapters.adapted_linear import begin, insert, published_weights
from millrace.trainer.checks.arithmetic import arithmetic
from millrace.trainer.checks.not_finite import not_finite_trajectories
from millrace.trainer.checks.rejected import impossible_trajectories
from millrace.trainer.files.checkpoint import Saver, load_checkpoint, prune_checkpoints
from millrace.trainer.files.directories import atomic_directory, sweep
from millrace.trainer.files.export import save_model
from millrace.trainer.files.tokens import read_tokenizer
from millrace.trainer.frozen.reference import load_reference, published_dtype
from millrace.trainer.frozen.teacher import load_teacher
from millrace.trainer.model import load_model, recompute_layers, vocabulary
from millrace.trainer.publish.publisher import Publisher, buffers_of
from millrace.trainer.ranks.mesh import Ranks, agreed
from millrace.trainer.trainer import PolicyTrainer, StepSettings

T = TypeVar("T")

CHECKPOINTS = "checkpoints"  # beside the exported model, in the run directory


class TorchTrainer:
    """`core.protocols.Trainer`, or one rank of several (`[trainer]`). Every rank gets the same commands, in
    the same order. RANK in the environment is the rank's number, MILLRACE_RENDEZVOUS the place where ranks
    meet.

    `config`: a whole configuration as plain data. `open_writer`: "package.module:function", called with
    an `Endpoint`, returns a `WeightsWriter`. `device` and `device_share`: see `devices.device`.
    """

    def __init__(
        self,
        config: dict[str, Any],
        run_dir: str,
        open_writer: str,
        device: str = "auto",
        device_share: float = 1.0,
    ) -> None:
        self._device = device, device_share
        self._config = Config.model_validate(config)
        self._ranks = join(self._config, self._device)
        self._run_dir = Path(run_dir)
        self._open_writer = find_object(open_writer, "`open_writer`")[0]
        self._turn = asyncio.Lock()
        self._trainer: PolicyTrainer | None = None
        self._saver: Saver | None = None
        self._publisher: Publisher | None = None
        self._writer: tuple[Endpoint, WeightsWriter] | None = None
        self._tokenizer: dict[str, bytes] = {}
        self._last: StepResult | None = None

    async def load(self, checkpoint: str | None) -> TrainerState:
        return await self._run(lambda: self._load(checkpoint), "the model and its optimizer")

    async def step(self, batch: Batch) -> StepResult | StepRejected:
        num_tokens = sum(len(g.prompt) + len(s.columns) for g in batch.groups for s in g.sequences)
        activity = f"its step from version {batch.version} ({num_tokens} tokens)"
        return await self._run(lambda: self._step(batch), activity)

    async def publish(self, *endpoints: Endpoint) -> None:
        await self._run(lambda: self._publish(endpoints[self._ranks.host]), "publishing")

    async def await_published(self) -> Published:
        """Without a turn: steps go on meanwhile."""
        if self._publisher is None:
            raise WorkerError("the trainer has no weights yet: `load` must come first")
        return await asyncio.to_thread(self._publisher.result)

    async def checkpoint(self, directory: str) -> None:
        await self._run(lambda: self._checkpoint(directory), "a checkpoint")

    async def await_saved(self, spared: Sequence[int] = ()) -> CheckpointInfo:
        """Without a turn: steps go on meanwhile."""
        if self._saver is None:
            raise WorkerError("the trainer has no weights yet: `load` must come first")
        info = await asyncio.to_thread(self._saver.result)
        directory, keep = Path(info.path).parent, self._config.checkpoints.keep
        if self._ranks.rank == 0:
            await asyncio.to_thread(
                lambda: prune_checkpoints(directory, newest=info.version, keep=keep, spared=spared)
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

    def _load(self, checkpoint: str | None) -> TrainerState:
        if self._saver is not None:
            self._saver.wait()  # the saver writes into the directories of `sweep`
        if self._publisher is not None:
            self._publisher.wait()
        self._trainer = self._saver = self._publisher = None  # free the old weights before the new ones
        self._last = None
        self._tokenizer = self._tokenizer or read_tokenizer(self._config.model.path)
        agreed(self._ranks, self._sweep)
        device = torch_device(*self._device)
        trainer = _policy_trainer(self._config, device, self._ranks)
        if checkpoint is not None:
            load_checkpoint(trainer, checkpoint, self._ranks)
        self._trainer, self._saver = trainer, Saver(trainer.optimizer, self._ranks)
        dtype = published_dtype(self._config)
        buffers = buffers_of(published_weights(trainer.model, dtype), dtype)
        self._publisher = Publisher(buffers, trainer.optimizer, self._ranks)
        format_text = computes(dtype, trainer.settings.dtype)
        rounding = arithmetic(device, self._config)
        return TrainerState(trainer.version, buffers.weights_bytes, format_text, rounding)

    def _sweep(self) -> None:
        """Sweep on the first rank. Other ranks begin to write after the sweep."""
        for directory in (self._run_dir, self._run_dir / CHECKPOINTS) if self._ranks.rank == 0 else ():
            sweep(directory)

    def _step(self, batch: Batch) -> StepResult | StepRejected:
        trainer = self._ready()
        if self._last is not None and batch.version == self._last.version - 1:
            return self._last
        if batch.version != trainer.version:
            raise DataError(
                f"a batch for version {batch.version} cannot be applied to the trainer's version "
                f"{trainer.version}: load the checkpoint it belongs to"
            )
        if bad := impossible_trajectories(batch, vocabulary(trainer.model)):
            reasons = "; ".join(f"trajectory {number}: {reason}" for number, reason in list(bad.items())[:4])
            return StepRejected(batch.version, list(bad), reasons, unfit=True)
        try:
            self._last = trainer.step(batch, rejected_dir=self._run_dir)
        except DigestMismatchError:
            self._trainer = self._last = None  # these weights may not be trained, published or saved
            raise
        except TrainingError as error:
            return StepRejected(batch.version, not_finite_trajectories(trainer, batch), str(error))
        except WeightsError as error:
            self._trainer = self._last = None  # these weights may not be published or saved
            ids = [s.trajectory_id for group in batch.groups for s in group.sequences]
            return StepRejected(batch.version, ids, str(error), weights_lost=True)
        return self._last

    def _publish(self, endpoint: Endpoint) -> None:
        trainer, publisher = self._ready(), self._publisher
        assert publisher is not None
        publisher.begin(lambda: self._writer_to(endpoint), endpoint, trainer.version)

    def _writer_to(self, endpoint: Endpoint) -> WeightsWriter:
        """The open writer, or a new writer if the relay has moved."""
        if self._writer is None or self._writer[0] != endpoint:
            if self._writer is not None:
                self._writer[1].close()
                self._writer = None
            with boundary("trainer", f"open the weight slots at {endpoint.path}", WeightsError):
                self._writer = (endpoint, self._open_writer(endpoint))
        return self._writer[1]

    def _checkpoint(self, directory: str) -> None:
        trainer, saver, began_s = self._ready(), self._saver, time.perf_counter()
        assert saver is not None
        agreed(self._ranks, lambda: self._refuse_changed(trainer.version))
        saver.begin(trainer, directory, began_s)

    def _refuse_changed(self, version: int) -> None:
        """Refuse to save weights that differ, in the published dtype, from the published `version`."""
        assert self._publisher is not None
        try:
            self._publisher.refuse_changed(version)
        except DigestMismatchError:
            self._trainer = None  # these weights may not be trained, published or saved
            raise

    def _export(self, directory: str) -> None:
        trainer = self._ready()
        with atomic_directory(Path(directory), marker="config.json", ranks=self._ranks) as path:
            save_model(trainer.model, self._tokenizer, path, published_dtype(self._config), self._ranks)
            if self._ranks.rank == 0:
                model_version.write(path, trainer.version)

    def _ready(self) -> PolicyTrainer:
        if self._trainer is None:
            raise WorkerError("the trainer has no weights yet: `load` must come first")
        return self._trainer


def join(config: Config, device: tuple[str, float]) -> Ranks:
    """This process among the ranks of `config`, after the ranks have met.

    Raises: WorkerError: other ranks do not come.
    """
    section, several = config.trainer, config.trainer.ranks > 1
    rank, rendezvous = (os.environ[key] if several else "0" for key in ("RANK", "MILLRACE_RENDEZVOUS"))
    divisions = section.shard, section.tensor, section.sequence
    ranks = Ranks(*divisions, int(rank), section.hosts, section.offload)
    if not ranks.alone:
        network = os.environ.get("MILLRACE_NETWORK", "")
        ranks.join(rendezvous if several else None, torch_device(*device), network)
    return ranks


def _policy_trainer(config: Config, device: torch.device, ranks: Ranks) -> PolicyTrainer:
    algorithm = of_run(config)
    model = _model(config, device, ranks)
    if config.model.recompute:
        recompute_layers(model)
    reference = None
    if algorithm.needs_reference and not config.reference_apart:
        is_base = config.adapter.rank is not None and teacher_of(config) is None
        reference = model if is_base else _frozen(config, device, ranks)
    settings = StepSettings(
        optimizer=config.optimizer,
        token_budget=config.batch.token_budget,
        max_tokens=config.sampling.max_tokens,
        temperature=config.sampling.temperature,
        dtype=computing_dtype(published_dtype(config), device),
        published=published_dtype(config),
        minibatches=config.batch.minibatches,
        epochs=config.batch.epochs,
    )
    return PolicyTrainer(model, algorithm, settings, reference=reference, ranks=ranks)


def _model(config: Config, device: torch.device, ranks: Ranks) -> PreTrainedModel:
    """The model to train: all of its weights, or its adapter."""
    dtype = published_dtype(config)
    if config.adapter.rank is None:
        return load_model(config.model.path, device, ranks, computing=computing_dtype(dtype, device))
    with_layers = partial(insert, config=config.adapter, published=dtype)
    model = load_model(config.model.path, device, ranks, with_layers)
    begin(model, dtype, config.seed)
    return model


def _frozen(config: Config, device: torch.device, ranks: Ranks) -> PreTrainedModel:
    """The teacher, or else the reference."""
    if (teacher := teacher_of(config)) is not None:
        return load_teacher(teacher, student=config.model.path, device=device, ranks=ranks)
    return load_reference(config, device, ranks)
