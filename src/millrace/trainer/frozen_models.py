"""Models that are not trained: the reference, and the teacher of on-policy distillation."""

from __future__ import annotations

import asyncio
import math
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from millrace.algorithms import of_run
from millrace.config.schema import Config
from millrace.core.digest import kind_of
from millrace.core.errors import DigestMismatchError, WorkerError, needing_memory
from millrace.core.types import Batch
from millrace.devices.device import computes, computing_dtype, torch_device
from millrace.trainer.adapted_linear import digest_of
from millrace.trainer.batch.batch_step import impossible_trajectories
from millrace.trainer.batch.flat_batch import flatten
from millrace.trainer.batch.packing import pack
from millrace.trainer.files.companion_files import refuse_other_tokens
from millrace.trainer.model import load_model, named_weights, row_logprobs, vocabulary
from millrace.trainer.ranks.mesh import ALONE, Ranks, local
from millrace.trainer.trainer import with_token_masks


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
