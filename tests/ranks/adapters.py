"""What ranks with an adapter do. Each function runs in every rank."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.ranks.work import BUDGET, CPU, Shape, batch_of, error, flat, meet
from trainer_doubles import make_trainer

from millrace.config.tables.algorithms import PolicyGradient
from millrace.config.tables.training import Adapter
from millrace.devices.low_rank import BASE
from millrace.trainer.adapted_linear import begin, insert, published_weights
from millrace.trainer.files.export import save_model
from millrace.trainer.model import load_model
from millrace.trainer.ranks.mesh import ALONE, Ranks
from millrace.trainer.trainer import PolicyTrainer

ADAPTER = Adapter(rank=4, kind="dora")
F32 = torch.float32


def trained(path: Path, ranks: Ranks) -> PolicyTrainer:
    """After three steps against the model without its adapter."""
    model = load_model(path, CPU, ranks, partial(insert, config=ADAPTER, published=F32))
    begin(model, F32, 0)
    trainer = make_trainer(
        PolicyGradient(kl=0.1), model=model, reference=model, ranks=ranks, token_budget=BUDGET
    )
    with tempfile.TemporaryDirectory() as scratch:
        for version in range(3):
            trainer.step(batch_of(version=version), rejected_dir=Path(scratch))
    return trainer


def exported(trainer: PolicyTrainer, directory: Path) -> dict[str, torch.Tensor]:
    directory.mkdir(exist_ok=True)
    save_model(trainer.model, {}, directory, F32, trainer.ranks)
    trainer.ranks.gather(None)
    return load_file(directory / "model.safetensors")


def found(rank: int, rendezvous: str, shapes: list[Shape], path: Path) -> dict[str, Any]:
    meetings, comparisons = meet(rank, rendezvous, shapes), {}
    one = trained(path, ALONE)
    base = published_weights(one.model, F32)[BASE]
    due = exported(one, path / f"one-{rank}")
    for ranks, shape in zip(meetings, shapes, strict=True):
        several = trained(path, ranks)
        out = exported(several, path / f"out-{'-'.join(shape)}")
        equal = (torch.allclose(out[name], weight, atol=1e-5) for name, weight in due.items())
        comparisons[str(shape)] = {
            "error": error(flat(several.trained), flat(one.trained)),
            "base": torch.equal(published_weights(several.model, F32)[BASE], base),
            "exported": out.keys() == due.keys() and all(equal),
        }
    return comparisons
