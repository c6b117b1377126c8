"""The reference: the model that a run began with, in the trainer or as a worker of its own.

The worker scores one group at a time, so that log-probs are a function of the group: a step that is repeated
is the same step, bit for bit. Between its packing and the trainer's lies rounding.

Shape suffixes: C = completion tokens of the group, N = trained tokens of one row.
"""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from millrace.config.schema import Config
from millrace.core.digest import NamedBuffer, digest_buffers, kind_of
from millrace.core.errors import DigestMismatchError, WorkerError, needing_memory
from millrace.core.types import TrainGroup
from millrace.placement.device import computes, computing_dtype, torch_device
from millrace.trainer.choices import choices_of
from millrace.trainer.flat_batch import mask_of, trees_of
from millrace.trainer.mesh import ALONE, Ranks, local
from millrace.trainer.model import load_model, named_weights, row_logprobs
from millrace.trainer.packing import pack
from millrace.trainer.trainer import with_choices


class ReferenceWorker:
    """`core.protocols.Reference`. `config`, `device` and `device_share`: as of the trainer."""

    def __init__(self, config: dict[str, Any], device: str = "auto", device_share: float = 1.0) -> None:
        self._config, self._device = Config.model_validate(config), (device, device_share)
        self._model: PreTrainedModel | None = None

    async def load(self, digest: str) -> str:
        return await asyncio.to_thread(self._load, digest)

    async def score(self, group: TrainGroup) -> list[array[float]]:
        return await asyncio.to_thread(self._score, group)

    def _load(self, digest: str) -> str:
        device, dtype = torch_device(*self._device), published_dtype(self._config)
        model = load_reference(self._config, device, ALONE)
        found = digest_buffers(_buffers(model, dtype), kind_of(digest))
        if found != digest:
            raise DigestMismatchError(
                f"the reference ({self._config.model.path}) has digest {found}, and version 0 was published "
                f"with {digest}\n  Its files were changed since the run began: put them back"
            )
        self._model = model
        return computes(dtype, computing_dtype(dtype, device))

    def _score(self, group: TrainGroup) -> list[array[float]]:
        if self._model is None:
            raise WorkerError("the reference has no weights yet: `load` must come first")
        config, device = self._config, self._model.device
        budget = config.batch.token_budget
        advice = f"Lower `batch.token_budget` ({budget}), which changes no gradient, or free memory"
        with needing_memory("the reference", f"group {group.group_id}", advice):
            found_C = reference_logprobs(
                self._model,
                group,
                token_budget=budget,
                temperature=config.sampling.temperature,
                dtype=computing_dtype(published_dtype(config), device),
            )
        ends = np.cumsum([len(sequence.columns) for sequence in group.sequences])
        return [array("f", part.tobytes()) for part in np.split(found_C, ends[:-1])]


@torch.no_grad()
def reference_logprobs(
    model: PreTrainedModel, group: TrainGroup, *, token_budget: int, temperature: float, dtype: torch.dtype
) -> NDArray[np.float32]:
    """(C,) in nats, one sequence after the other; NaN where a token is not trained."""
    masks, choices_C = [mask_of(s) for s in group.sequences], choices_of(group.sequences)
    found_C = np.full(sum(map(len, masks)), np.nan, np.float32)
    for row in pack(trees_of([group], masks), token_budget):
        row = with_choices(row, choices_C)
        logprobs_N = row_logprobs(model, row, temperature=temperature, dtype=dtype)[0]
        found_C[row.flat_N] = logprobs_N.cpu().numpy()
    return found_C


def load_reference(config: Config, device: torch.device, ranks: Ranks) -> PreTrainedModel:
    """Version 0 as replicas have it."""
    model = load_model(config.model.path, device, ranks)
    for weight in map(local, model.parameters()):
        weight.detach().copy_(weight.to(published_dtype(config)))
    return model.requires_grad_(False)


def published_dtype(config: Config) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.model.dtype]


def _buffers(model: PreTrainedModel, dtype: torch.dtype) -> list[NamedBuffer]:
    """As the trainer publishes them."""
    found = []
    for name, weight in named_weights(model).items():
        held = weight.detach().to("cpu", dtype).contiguous()
        data = held.view(-1).view(torch.uint8).numpy()
        found.append(NamedBuffer(name, str(dtype).removeprefix("torch."), tuple(held.shape), data))
    return found
