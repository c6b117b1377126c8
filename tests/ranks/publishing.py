"""What ranks do in the test of publications."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from tests.ranks.work import BF16, CPU, Shape, batch_of, meet, trainer_of
from trainer_doubles import save_checkpoint

from millrace.config.tables.training import Optimizer
from millrace.core.digest import NamedBuffer
from millrace.core.types import Endpoint
from millrace.trainer.files.checkpoint import load_checkpoint
from millrace.trainer.model import load_model, named_weights
from millrace.trainer.publish.publisher import Publisher, buffers_of
from millrace.trainer.ranks.mesh import ALONE
from millrace.weights.ring import open_writer

Tensors = dict[str, torch.Tensor]


def publish(
    rank: int, rendezvous: str, cases: list[tuple[Path, Shape]], endpoint: Endpoint, out: Path
) -> list[str]:
    """For each model and shape: a version of the weights as they are loaded, and one after a step, which is
    saved as well. Returns the digest of each version."""
    writer, digests = open_writer(endpoint), list[str]()
    for (path, _), ranks in zip(cases, meet(rank, rendezvous, [shape for _, shape in cases]), strict=True):
        trainer = trainer_of(path, ranks, optimizer=Optimizer(lr=1e-2))
        publisher = Publisher(buffers_of(named_weights(trainer.model), BF16), trainer.optimizer, ranks)
        for step in range(2):
            if step:
                trainer.step(batch_of(), rejected_dir=out)
            publisher.begin(lambda: writer, endpoint, len(digests))
            digests.append(publisher.result().digest)
        save_checkpoint(trainer, out / str(len(digests) - 1))
    return digests


def weights_bytes(path: Path) -> int:
    return sum(weight.nbytes for weight in of_one_process(path, None).values())


def of_one_process(path: Path, checkpoint: Path | None) -> Tensors:
    """The weights of a trainer without ranks, as published: from the model, or from a checkpoint."""
    if checkpoint is None:
        return rounded(named_weights(load_model(path, CPU)))
    trainer = trainer_of(path, ALONE)
    load_checkpoint(trainer, checkpoint, ALONE)
    return rounded(named_weights(trainer.model))


def rounded(weights: Tensors) -> Tensors:
    return {name: weight.detach().to(BF16).contiguous() for name, weight in weights.items()}


def as_buffers(weights: Tensors) -> list[NamedBuffer]:
    return [
        NamedBuffer(name, "bfloat16", tuple(weight.shape), weight.view(-1).view(torch.uint8).numpy())
        for name, weight in weights.items()
    ]


def checkpoint_in(directory: Path) -> Path:
    (entry,) = os.scandir(directory)
    return Path(entry.path)
