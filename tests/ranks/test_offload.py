"""Weights, gradients and optimizer on the host. Where there is no GPU, nothing may change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.long import few
from tests.ranks.together import together
from tests.ranks.work import CPU, three_steps, trainer_of

from millrace.trainer.ranks.mesh import ALONE, Ranks, local


def pairs(rank: int, rendezvous: str | None, shape: dict[str, int], path: Path) -> list[Any]:
    """Weights after three steps, without and with offloading."""
    hosted = Ranks(**shape, rank=rank, offload=True)
    hosted.join(rendezvous if hosted.world > 1 else None, CPU)
    plain = Ranks(**shape, rank=rank) if hosted.world > 1 else ALONE
    return [three_steps(path, ranks)[0].numpy() for ranks in (plain, hosted)]


@pytest.mark.parametrize("shape", few([{}, {"shard": 2}, {"tensor": 2}]), ids=str)
def test_an_offloaded_trainer_makes_the_same_steps_bit_for_bit(shape: dict[str, int], tmp_path: Path) -> None:
    from trainer_doubles import save_tiny_model

    path = save_tiny_model(tmp_path / "model")
    for plain, hosted in together(2 if shape else 1, pairs, shape, path):
        assert (plain == hosted).all()


def places(rank: int, rendezvous: str | None, shape: dict[str, Any], path: Path) -> list[int]:
    """How many weights a step moved to another address."""
    from trainer_doubles import make_batch

    ranks = Ranks(**shape, rank=rank)
    ranks.join(rendezvous if ranks.world > 1 else None, CPU)
    trainer = trainer_of(path, ranks)
    before = [local(weight).data_ptr() for weight in trainer.model.parameters()]
    trainer.accumulate(make_batch())
    after = [local(weight).data_ptr() for weight in trainer.model.parameters()]
    return [one != other for one, other in zip(before, after, strict=True)]


@pytest.mark.parametrize("shape", [{"offload": True}, {"shard": 2}], ids=str)
def test_weights_stay_where_they_are_published_from(shape: dict[str, Any], tmp_path: Path) -> None:
    """Of 67 rows of the vocabulary two ranks have different numbers, and FSDP2 pads the smaller block before
    it uses the block: as soon as the model is loaded."""
    from trainer_doubles import save_tiny_model

    path = save_tiny_model(tmp_path / "model", vocab_size=67)
    for moved in together(shape.get("shard", 1), places, shape, path):
        assert not any(moved)


def moved(rank: int, rendezvous: str | None, shape: dict[str, Any], path: Path) -> list[str]:
    """Shapes of the weights that loading gives to `DTensor.from_local`, which moves them to the mesh."""
    from unittest import mock

    from torch.distributed.tensor import DTensor

    from millrace.trainer.model import load_model

    ranks = Ranks(**shape, rank=rank, offload=True)
    ranks.join(rendezvous if ranks.world > 1 else None, CPU)
    shapes, wrap = [], DTensor.from_local

    def seen(block: Any, *rest: Any, **more: Any) -> Any:
        shapes.append(str(tuple(block.shape)))
        return wrap(block, *rest, **more)

    with mock.patch.object(DTensor, "from_local", staticmethod(seen)):
        load_model(path, CPU, ranks)
    return shapes


@pytest.mark.parametrize("shape", [{}, {"shard": 2}, {"tensor": 2}], ids=str)
def test_loading_an_offloaded_model_moves_no_weight_to_the_gpu(shape: dict[str, int], tmp_path: Path) -> None:
    from trainer_doubles import save_tiny_model

    path = save_tiny_model(tmp_path / "model")
    assert together(2 if shape else 1, moved, shape, path) == [[]] * (2 if shape else 1)
