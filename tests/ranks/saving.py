"""What ranks do in the tests of checkpoints and exports."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks.work import CPU, Shape, batch_of, meet, trainer_of
from trainer_doubles import save_checkpoint

from millrace.trainer.files import checkpoint
from millrace.trainer.files.checkpoint import Saver, load_checkpoint
from millrace.trainer.files.directories import atomic_directory
from millrace.trainer.files.export import save_model
from millrace.trainer.files.tensor_files import fill
from millrace.trainer.model import load_model
from millrace.trainer.ranks.mesh import Ranks, local
from millrace.trainer.trainer import PolicyTrainer


def train(trainer: PolicyTrainer, steps: range, rejected_dir: Path) -> None:
    for version in steps:
        trainer.step(batch_of(version=version), rejected_dir=rejected_dir)


def own(trainer: PolicyTrainer) -> list[torch.Tensor]:
    return [local(weight).clone() for weight in trainer.model.parameters()]


def save_and_go_on(rank: int, rendezvous: str, shape: Shape, model: Path, out: Path) -> bool:
    """Two steps, a checkpoint while three more are made; then these three again, from the checkpoint."""
    (ranks,) = meet(rank, rendezvous, [shape])
    trainer = trainer_of(model, ranks)
    saver = Saver(trainer.optimizer, ranks)
    train(trainer, range(2), out)
    saver.begin(trainer, out)
    train(trainer, range(2, 5), out)
    path = saver.result().path
    resumed = trainer_of(model, ranks)
    load_checkpoint(resumed, path, ranks)
    train(resumed, range(2, 5), out)
    return all(map(torch.equal, own(trainer), own(resumed)))


def load_and_save_again(rank: int, rendezvous: str, shapes: list[Shape], model: Path, saved: Path) -> None:
    for number, ranks in enumerate(meet(rank, rendezvous, shapes)):
        trainer = trainer_of(model, ranks)
        load_checkpoint(trainer, saved, ranks)
        save_checkpoint(trainer, saved.parent / str(number))


def die_in_a_save(rank: int, rendezvous: str, shape: Shape, model: Path, out: Path) -> str:
    """Rank 1 dies when its last block is not written yet. What rank 0 is told."""
    (ranks,) = meet(rank, rendezvous, [shape])
    trainer = trainer_of(model, ranks)
    train(trainer, range(1), out)
    save_checkpoint(trainer, out)
    train(trainer, range(1, 2), out)

    def half(path: Path, files: Any, parts: Any) -> None:
        fill(path, files, parts[:-1])
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        checkpoint.fill = half
    with pytest.raises(Exception) as raised:
        save_checkpoint(trainer, out)
    return repr(raised.value)


def fail_in_a_save(rank: int, rendezvous: str, shape: Shape, model: Path, out: Path, where: str) -> str:
    """The disk of rank 1 is full. What each rank is told. `where`: the function that finds out."""
    (ranks,) = meet(rank, rendezvous, [shape])
    trainer = trainer_of(model, ranks)

    def full(*unused: Any) -> None:
        raise OSError(28, "No space left on device")

    if rank == 1:
        setattr(checkpoint, where, full)
    with pytest.raises(Exception) as raised:
        save_checkpoint(trainer, out)
    return repr(raised.value)


def export(rank: int, rendezvous: str, shape: Shape, model: Path, out: Path) -> int:
    """Bytes by which this process grew meanwhile, at most."""
    (ranks,) = meet(rank, rendezvous, [shape])
    loaded = load_model(model, CPU, ranks)
    written(loaded, out / "first", ranks)  # what is imported and made once
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    written(loaded, out / "second", ranks)
    return status("VmHWM") - before


def written(model: Any, out: Path, ranks: Ranks) -> None:
    with atomic_directory(out, marker="config.json", ranks=ranks) as directory:
        save_model(model, {}, directory, torch.bfloat16, ranks)


def status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
