"""What a step of the trainer takes of memory, counted on fake tensors: shapes without numbers.

The trainer's own code runs: packed attention, chunks of logits, recomputing, the division among ranks, the
optimizer. Nothing is allocated, so a CPU counts a model of 70 B parameters in seconds. Ranks are one process
in a process group that sends nothing.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM, Qwen2Config

from millrace.algorithms import of_run
from millrace.config.schema import Config
from millrace.core.completion.columns import TokenColumns
from millrace.core.types import Batch, TrainGroup, TrainSequence
from millrace.devices import matmul
from millrace.trainer import model as trainer_model
from millrace.trainer import row_logprobs
from millrace.trainer.batch.batch_step import StepSettings
from millrace.trainer.kernels import products
from millrace.trainer.kernels.fp8_matmul import quantise_layers
from millrace.trainer.kernels.row_threads import RowThreads
from millrace.trainer.model import _pair_logprobs, recompute_layers
from millrace.trainer.ranks import mesh
from millrace.trainer.ranks.divided import divide
from millrace.trainer.ranks.mesh import ALONE, Ranks
from millrace.trainer.row_attention import NAME
from millrace.trainer.trainer import PolicyTrainer

PROMPT, GROUP = 512, 4
ON_GPU = [
    (row_logprobs, "has_own_memory", lambda device: True),
    (trainer_model, "has_own_memory", lambda device: True),
    (row_logprobs, "wide_factor", lambda x, dtype: x.to(dtype)),
    (matmul, "_narrow_on_gpu", lambda x: x.dtype.itemsize < 4),
]
"""Names of the trainer's code that decide by the device, as a GPU decides."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one rank. `kept`: masters, gradients and moments. `moment`: the most beside these."""

    kept: int
    moment: int

    @property
    def peak(self) -> int:
        return self.kept + self.moment

    def at(self, layers: int, other: StepMemory, other_layers: int, wanted: int) -> StepMemory:
        """Of `wanted` layers: memory grows evenly with the number of layers."""

        def line(here: int, there: int) -> int:
            return here + (there - here) * (wanted - layers) // (other_layers - layers)

        return StepMemory(line(self.kept, other.kept), line(self.moment, other.moment))


class Counted(TorchDispatchMode):
    """Bytes of all storages that operations make, while they live: `now`, and `peak` at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, torch.Tensor):
                self._see(getattr(tensor, "_local_tensor", tensor).untyped_storage())
        return made

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._live:
            self._live[storage._cdata] = 0
            weakref.finalize(storage, self._gone, storage._cdata)
            self.resized(storage)

    def _gone(self, key: int) -> None:
        self.now -= self._live.pop(key)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """FSDP empties what it put together in this way."""
        if storage._cdata in self._live:
            self.now += storage.nbytes() - self._live[storage._cdata]
            self._live[storage._cdata] = storage.nbytes()
            self.peak = max(self.peak, self.now)


def step_memory(shape: Mapping[str, Any], config: Config, layers: tuple[int, int] = (2, 4)) -> StepMemory:
    """Of a rank, for a micro-batch of `batch.token_budget` tokens. `shape`: keys of `Qwen2Config`. Two models
    of few `layers` are counted, and what is said is of all layers."""
    few, more = layers
    counted = [counted_step({**shape, "num_hidden_layers": count}, config) for count in layers]
    return counted[0].at(few, counted[1], more, shape["num_hidden_layers"])


def counted_step(shape: Mapping[str, Any], config: Config) -> StepMemory:
    """Of all layers of this model."""
    with _ranks(config) as ranks, ExitStack() as stack:
        for target, name, value in ON_GPU:
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(_real_meshes())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        counted = stack.enter_context(Counted())
        stack.enter_context(_resizes(counted))
        trainer = _trainer(shape, config, ranks)
        prepared = trainer._prepared(_batch(config.batch.token_budget), 1)
        [row] = trainer._local(prepared.rows[0], prepared.flat)
        assert len(row.tokens_T) > 0.99 * config.batch.token_budget // ranks.sequence
        trainer.optimizer.step()  # makes the moments
        gc.collect()
        kept = counted.peak = counted.now
        with trainer._serving():
            trainer._backward(row, prepared.flat, 0.0, first=True)
        trainer.optimizer.step()
        return StepMemory(kept, counted.peak - kept)


@contextmanager
def _ranks(config: Config) -> Iterator[Ranks]:
    """The first rank. Meshes are made of numbers, so before tensors are fake."""
    asked = config.trainer
    if asked.ranks == 1:
        yield ALONE
        return
    distributed.init_process_group("fake", rank=0, world_size=asked.ranks, store=FakeStore())
    try:
        ranks = Ranks(asked.shard, asked.tensor, asked.sequence)
        assert ranks.mesh is not None and ranks.weights_mesh is not None
        yield ranks
    finally:
        mesh._mesh.cache_clear()
        distributed.destroy_process_group()


@contextmanager
def _resizes(counted: Counted) -> Iterator[None]:
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        answer = resize(storage, size)
        counted.resized(storage)
        return answer

    with mock.patch.object(torch.UntypedStorage, "resize_", resized):
        yield


@contextmanager
def _real_meshes() -> Iterator[None]:
    """FSDP joins two meshes while it divides a model."""
    join = DeviceMesh._concatenate

    def joined(meshes: Any) -> Any:
        with _disable_current_modes():
            return join(meshes)

    with mock.patch.object(DeviceMesh, "_concatenate", staticmethod(joined)):
        yield


def _trainer(shape: Mapping[str, Any], config: Config, ranks: Ranks) -> PolicyTrainer:
    dtype = DTYPES[config.model.dtype]
    model = AutoModelForCausalLM.from_config(Qwen2Config(**shape, attn_implementation=NAME)).eval()
    if not ranks.alone:
        divide(model, ranks, _pair_logprobs, dtype)
    if config.trainer.quantization is not None:
        quantise_layers(model, torch.device("cpu"))
    if ranks.tensor == 1:
        products.install_linear(model)
    if config.model.recompute:
        recompute_layers(model)
    settings = StepSettings(
        config.optimizer, config.batch.token_budget, config.sampling.max_tokens, 1.0, dtype, dtype
    )
    trainer = PolicyTrainer(model, of_run(config), settings, ranks=ranks)
    trainer._rows = RowThreads(config.batch.token_budget)  # as on a GPU: a CPU's threads have shorter rows
    return trainer


def _batch(tokens: int) -> Batch:
    """One group that fills a row: sequences share nothing but their prompt."""
    length = (tokens - PROMPT) // GROUP + 1  # what follows the last token is not forwarded

    def sequence(index: int) -> TrainSequence:
        columns = TokenColumns.of([index, *[7] * (length - 1)], [-1.0] * length, 0)
        return TrainSequence(index, columns, float(index % 2), truncated=False)

    return Batch(0, [TrainGroup(0, [1] * PROMPT, [sequence(index) for index in range(GROUP)])])
