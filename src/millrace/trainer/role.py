"""The trainer in torch as a worker, and on a device that is lent in shifts; and models that are not trained:
the reference, and the teacher of on-policy distillation.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.backends import cpu
from transformers import PreTrainedModel

from millrace import __version__
from millrace.algorithms import of_run
from millrace.config.schema import Config
from millrace.core import model_version
from millrace.core.digest import kind_of
from millrace.core.errors import DigestMismatchError, WorkerError, needing_memory
from millrace.core.types import Batch, Endpoint, TrainerState
from millrace.devices.device import computes, computing_dtype, torch_device
from millrace.devices.large_memory import keep_freed
from millrace.devices.matmul import by_onednn
from millrace.devices.released_memory import ReleasedMemory
from millrace.placement.number_format import cpu_model
from millrace.trainer.adapted_linear import begin, digest_of, insert
from millrace.trainer.batch.batch_step import StepSettings, impossible_trajectories
from millrace.trainer.batch.flat_batch import flatten
from millrace.trainer.batch.packing import pack
from millrace.trainer.drafter_training import policy_trainer, published_tensors
from millrace.trainer.files.checkpoint import Saver, load_checkpoint
from millrace.trainer.files.companion_files import read_tokenizer, refuse_other_tokens
from millrace.trainer.files.directories import atomic_directory, sweep
from millrace.trainer.files.export import save_model
from millrace.trainer.files.moments import take_moments
from millrace.trainer.kernels.fp8_matmul import DESCRIPTION
from millrace.trainer.model import load_model, named_weights, recompute_layers, row_logprobs, vocabulary
from millrace.trainer.optimizer import plain_tensors
from millrace.trainer.publish.publisher import Publisher, buffers_of
from millrace.trainer.ranks.blocks import computing_device
from millrace.trainer.ranks.mesh import ALONE, Ranks, agreed, local
from millrace.trainer.trainer import PolicyTrainer, with_token_masks
from millrace.trainer.worker import CHECKPOINTS, TrainerWorker


class TorchTrainer(TrainerWorker[PolicyTrainer]):
    """The trainer, or one rank of several (`[trainer]`). Every rank gets the same commands, in
    the same order. RANK in the environment is the rank's number, MILLRACE_RENDEZVOUS the place where ranks
    meet.

    `device` and `device_share`: see `devices.device`. `moments`: the optimizer's state that the run begins
    with, see `files.moments`; None: it begins without. Other arguments: see `TrainerWorker`.
    """

    def __init__(
        self,
        config: dict[str, Any],
        run_dir: str,
        open_writer: str,
        device: str = "auto",
        device_share: float = 1.0,
        moments: str | None = None,
    ) -> None:
        super().__init__(config, run_dir, open_writer)
        self._device, self._moments = (device, device_share), moments
        self._ranks = join(self._config, self._device)
        self._prunes = self._ranks.rank == 0
        self._tokenizer: dict[str, bytes] = {}

    def _load(self, checkpoint: str | None) -> TrainerState:
        self._unload()  # the saver writes into the directories of `sweep`
        self._tokenizer = self._tokenizer or read_tokenizer(self._config.model.path)
        agreed(self._ranks, self._sweep)
        device = torch_device(*self._device)
        if device.type == "cpu":
            keep_freed()
        trainer = _policy_trainer(self._config, device, self._ranks)
        if checkpoint is not None:
            load_checkpoint(trainer, checkpoint, self._ranks)
        elif self._moments is not None:
            take_moments(trainer, Path(self._moments), self._ranks)
        self._trainer, self._saver = trainer, Saver(trainer.optimizer, self._ranks)
        dtype = published_dtype(self._config)
        buffers = buffers_of(published_tensors(trainer, dtype), dtype)
        self._publisher = Publisher(buffers, trainer.optimizer, self._ranks)
        formats = computes(dtype, trainer.settings.dtype)
        formats += "" if self._config.trainer.quantization is None else DESCRIPTION
        return TrainerState(trainer.version, buffers.weights_bytes, formats, arithmetic(device, self._config))

    def _sweep(self) -> None:
        """Sweep on the first rank. Other ranks begin to write after the sweep."""
        for directory in (self._run_dir, self._run_dir / CHECKPOINTS) if self._ranks.rank == 0 else ():
            sweep(directory)

    def _publish(self, endpoints: Sequence[Endpoint]) -> None:
        trainer, endpoint = self._ready(), endpoints[self._ranks.host]
        self._publisher.begin(lambda: self._writer_to(endpoint), endpoint, trainer.version)

    def _checkpoint(self, directory: str) -> None:
        trainer, began_s = self._ready(), time.perf_counter()
        agreed(self._ranks, lambda: self._refuse_changed(trainer.version))
        self._saver.begin(trainer, directory, began_s)

    def _export(self, directory: str) -> None:
        trainer = self._ready()
        with atomic_directory(Path(directory), marker="config.json", ranks=self._ranks) as path:
            save_model(trainer.model, self._tokenizer, path, published_dtype(self._config), self._ranks)
            if self._ranks.rank == 0:
                model_version.write(path, trainer.version)

    def _vocabulary(self) -> int:
        return vocabulary(self._ready().model)


def join(config: Config, device: tuple[str, float]) -> Ranks:
    """This process among the ranks of `config`, after it has opened its device and the ranks have met.

    Raises: WorkerError: other ranks do not come.
    """
    section, several = config.trainer, config.trainer.ranks > 1
    rank, rendezvous = (os.environ[key] if several else "0" for key in ("RANK", "MILLRACE_RENDEZVOUS"))
    divisions = section.shard, section.tensor, section.sequence
    ranks = Ranks(*divisions, int(rank), section.hosts, section.offload)
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
        is_base = config.adapter.rank is not None and config.teacher is None
        reference = model if is_base else _frozen(config, device, ranks)
    settings = StepSettings(
        optimizer=config.optimizer,
        token_budget=config.batch.token_budget,
        max_tokens=config.completion_tokens_max,
        temperature=config.sampling.temperature,
        dtype=computing_dtype(published_dtype(config), device),
        published=published_dtype(config),
        minibatches=config.batch.minibatches,
        epochs=config.batch.epochs,
    )
    return policy_trainer(config, model, algorithm, settings, reference=reference, ranks=ranks)


def _model(config: Config, device: torch.device, ranks: Ranks) -> PreTrainedModel:
    """The model to train: all of its weights, or its adapter."""
    dtype = published_dtype(config)
    if config.adapter.rank is None:
        quantised, computing = config.trainer.quantization is not None, computing_dtype(dtype, device)
        return load_model(config.model.path, device, ranks, computing=computing, quantised=quantised)
    with_layers = partial(insert, config=config.adapter, published=dtype)
    model = load_model(config.model.path, device, ranks, with_layers)
    begin(model, dtype, config.seed)
    return model


def _frozen(config: Config, device: torch.device, ranks: Ranks) -> PreTrainedModel:
    """The teacher, or else the reference."""
    if (teacher := config.teacher) is not None:
        return load_teacher(teacher, student=config.model.path, device=device, ranks=ranks)
    return load_reference(config, device, ranks)


def arithmetic(device: torch.device, config: Config) -> str:
    """The arithmetic in words. Empty on a GPU, where the order of sums is left to chance.

    Packing (`token_budget`), ranks and threads decide the order of sums; the CPU and torch decide the
    kernels.
    """
    if device.type != "cpu":
        return ""
    facts = (
        f"Millrace {__version__}",
        f"torch {torch.__version__}",
        f"{cpu_model()} ({cpu.get_cpu_capability()})",
        f"{torch.get_num_threads()} threads",
        *(("products by oneDNN",) if by_onednn() else ()),
        f"batch.token_budget {config.batch.token_budget}",
        f"model.recompute {config.model.recompute}",
        *(f"trainer.{key} {value}" for key, value in config.trainer if isinstance(value, int) and value > 1),
        *(("trainer.quantization fp8",) if config.trainer.quantization else ()),
        *(f"{name}={value}" for name, value in sorted(os.environ.items()) if name in _DECIDE),
    )
    return ", ".join(facts)


_DECIDE = (
    *("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS"),
    *("DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA"),  # oneDNN reads both names
)


# ---------------------------------------------------------------- on a device that is lent in shifts


class SharedTrainer(TorchTrainer):
    """Asleep, it keeps weights, optimizer and reference: on a CPU in a file in the run directory, else in the
    memory of the host. Gradients, which are 0 between two steps, and copies for publishing and saving are not
    kept. Every rank sleeps by itself. Arguments: as of `TorchTrainer`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._asleep: ReleasedMemory | None = None

    async def sleep(self) -> None:
        await self._run(self._sleep, "going to sleep")

    async def wake(self) -> None:
        await self._run(self._wake, "its weights and its optimizer, at waking")

    def _sleep(self) -> None:
        """Raises: StorageError: the file cannot be written. Then the trainer is awake."""
        if self._asleep is not None or self._trainer is None:
            return
        assert self._publisher is not None and self._saver is not None
        self._publisher.wait()
        self._saver.forget()
        gradients = [local(p.grad) for p in self._trainer.trained if p.grad is not None]
        forgotten = [*gradients, *self._publisher.buffers.copies()]
        self._asleep = ReleasedMemory(
            forgotten,
            _kept(self._trainer),
            device_type=computing_device(self._trainer.model).type,
            directory=self._run_dir,
        )

    def _wake(self) -> None:
        if self._asleep is not None:
            self._asleep.take_again()
        self._asleep = None

    def _load(self, checkpoint: str | None) -> TrainerState:
        self._asleep = None  # what it kept is loaded anew
        return super()._load(checkpoint)

    def _ready(self) -> PolicyTrainer:
        if self._asleep is not None:
            raise WorkerError("the trainer is asleep: `wake` must come first")
        return super()._ready()


def _kept(trainer: PolicyTrainer) -> Iterator[torch.Tensor]:
    for model in filter(None, (trainer.model, trainer.reference, trainer.value_head)):
        yield from (local(tensor) for tensor in (*model.parameters(), *model.buffers()))
    for state in trainer.optimizer.state.values():
        yield from (local(each) for each in plain_tensors(state).values() if isinstance(each, torch.Tensor))


# ---------------------------------------------------------------- frozen models


class ReferenceWorker:
    """`core.protocols.Reference`. `config`, `device` and `device_share`: as of the trainer."""

    def __init__(self, config: dict[str, Any], device: str = "auto", device_share: float = 1.0) -> None:
        self._config, self._device = Config.model_validate(config), (device, device_share)
        self._model: PreTrainedModel | None = None

    async def load(self, digest: str) -> str:
        return await asyncio.to_thread(self._load, digest)

    async def score(self, batch: Batch) -> list[array[float]]:
        return await asyncio.to_thread(self._score, batch)

    def _load(self, digest: str) -> str:
        device, dtype = torch_device(*self._device), published_dtype(self._config)
        model = load_reference(self._config, device, ALONE)
        loaded = digest_of(named_weights(model), dtype, kind_of(digest))
        if loaded != digest:
            raise DigestMismatchError(
                f"the reference ({self._config.model.path}) has digest {loaded}, and version 0 was published "
                f"with {digest}\n  Its files were changed since the run began: put them back"
            )
        self._model = model
        return computes(dtype, computing_dtype(dtype, device))

    def _score(self, batch: Batch) -> list[array[float]]:
        if self._model is None:
            raise WorkerError("the reference has no weights yet: `load` must come first")
        sequences = [sequence for group in batch.groups for sequence in group.sequences]
        if impossible_trajectories(batch, vocabulary(self._model)):  # the trainer rejects it
            return [array("f", [math.nan]) * len(sequence.columns) for sequence in sequences]
        budget = self._config.batch.token_budget
        advice = f"Lower `batch.token_budget` ({budget}), which changes no gradient, or free memory"
        with needing_memory("the reference", f"the batch of version {batch.version}", advice):
            logprobs_C = reference_logprobs(self._model, batch, self._config)
        ends = np.cumsum([len(sequence.columns) for sequence in sequences])
        return [array("f", logprobs.tobytes()) for logprobs in np.split(logprobs_C, ends[:-1])]


@torch.no_grad()
def reference_logprobs(model: PreTrainedModel, batch: Batch, config: Config) -> NDArray[np.float32]:
    """(C,) in nats; NaN for tokens that are not trained. Raises: DataError: the batch is malformed."""
    flat = flatten(
        batch,
        of_run(config),
        max_tokens=config.completion_tokens_max,
        minibatches=config.batch.minibatches,
    )
    dtype = computing_dtype(published_dtype(config), model.device)
    logprobs_C = np.full(len(flat.behavior_C), np.nan, np.float32)
    for row in (row for trees in flat.minibatches for row in pack(trees, config.batch.token_budget)):
        chosen = replace(with_token_masks(row, flat.masks_C), routing_TW=None)
        logprobs_N = row_logprobs(model, chosen, temperature=config.sampling.temperature, dtype=dtype)[0]
        logprobs_C[row.flat_N] = logprobs_N.cpu().numpy()
    return logprobs_C


def load_reference(config: Config, device: torch.device, ranks: Ranks) -> PreTrainedModel:
    """The weights of version 0, rounded as replicas have them."""
    dtype = published_dtype(config)
    model = load_model(config.model.path, device, ranks, computing=computing_dtype(dtype, device))
    for weight in map(local, model.parameters()):
        weight.copy_(weight.to(dtype))
    return model


def published_dtype(config: Config) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.model.dtype]


def load_teacher(path: str, *, student: str, device: torch.device, ranks: Ranks) -> PreTrainedModel:
    """The model in `path`. `student`: the directory of the model that is trained.

    Raises: DataError: `path` is no model, or the model has other tokens.
    """
    refuse_other_tokens(path, student)
    return load_model(path, device, ranks)
