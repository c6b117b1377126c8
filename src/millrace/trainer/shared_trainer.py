"""The trainer on a device that is lent in shifts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from millrace.core.errors import WorkerError
from millrace.core.types import TrainerState
from millrace.devices.released_memory import ReleasedMemory
from millrace.trainer.optimizer import plain_tensors
from millrace.trainer.ranks.mesh import local
from millrace.trainer.ranks.offload import computing_device
from millrace.trainer.role import TorchTrainer
from millrace.trainer.trainer import PolicyTrainer


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
