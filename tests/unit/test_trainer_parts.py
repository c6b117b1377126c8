"""The parts of all ranks are the weights: every value in one of them, none in two."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from millrace.core.errors import WeightsError
from millrace.trainer.ranks.blocks import OwnedBlock, owned_blocks

SHARD, TENSOR = 2, 2
WORLD = SHARD * TENSOR


def on_every_rank(work: Callable[[], list[OwnedBlock]]) -> list[list[OwnedBlock]]:
    """`work` as each rank of a group does it that exchanges nothing."""
    found = []
    for rank in range(WORLD):
        distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
        try:
            found.append(work())
        finally:
            distributed.destroy_process_group()
    return found


def mesh():
    return init_device_mesh("cpu", (SHARD, TENSOR), mesh_dim_names=("shard", "tensor"))


def together(found: list[list[OwnedBlock]], whole: torch.Tensor) -> torch.Tensor:
    """The weight that the parts make. Each value must come from exactly one part."""
    made, times = torch.zeros_like(whole), torch.zeros(whole.shape, dtype=torch.int64)
    for part in (part for of_rank in found for part in of_rank):
        assert part.shape == tuple(whole.shape) and part.block.numel()
        where = tuple(slice(a, a + n) for a, n in zip(part.start, part.block.shape, strict=True))
        made[where] = part.block
        times[where] += 1
    assert bool((times == 1).all()), times
    return made


def counted(*shape: int) -> torch.Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), Shard(0)),
        (Shard(0), Shard(1)),
        (Shard(1), Shard(0)),
        (Shard(0), Replicate()),
        (Replicate(), Shard(1)),
        (Replicate(), Replicate()),
        (_StridedShard(0, split_factor=2), Shard(0)),
        (_StridedShard(1, split_factor=2), Shard(1)),
        (Shard(0), _StridedShard(0, split_factor=2)),
        (Replicate(), _StridedShard(1, split_factor=3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(8, 12), (7, 5), (1, 3), (6, 4, 3)], ids=str)
def test_parts_of_every_placement_make_the_weight(placements, shape) -> None:
    whole = counted(*shape)
    found = on_every_rank(
        lambda: owned_blocks({"w": distribute_tensor(whole, mesh(), placements, src_data_rank=None)})
    )
    assert torch.equal(together(found, whole), whole)


def test_a_fused_projection_is_several_parts_of_a_rank() -> None:
    whole = counted(8, 3)  # gate above up: each tensor rank has a half of both
    placements = (Replicate(), _StridedShard(0, split_factor=2))
    found = on_every_rank(
        lambda: owned_blocks({"w": distribute_tensor(whole, mesh(), placements, src_data_rank=None)})
    )
    assert [[part.start for part in of_rank] for of_rank in found[:2]] == [[(0, 0), (4, 0)], [(2, 0), (6, 0)]]


def test_the_first_rank_answers_for_plain_tensors() -> None:
    found = on_every_rank(lambda: owned_blocks({"w": counted(3), "none": torch.zeros(0, 4)}))
    assert [len(of_rank) for of_rank in found] == [1, 0, 0, 0]


def test_a_process_alone_answers_for_everything() -> None:
    whole = counted(2, 3)
    (part,) = owned_blocks({"w": whole})
    assert (part.name, part.shape, part.start) == ("w", (2, 3), (0, 0))
    assert part.block.data_ptr() == whole.data_ptr()


def test_a_sum_over_ranks_is_refused() -> None:
    def here() -> list[OwnedBlock]:
        placed = distribute_tensor(counted(4), mesh(), [Replicate(), Replicate()], src_data_rank=None)
        return owned_blocks(
            {"w": type(placed).from_local(placed.to_local(), mesh(), [Replicate(), Partial()])}
        )

    with pytest.raises(WeightsError, match="sum over ranks"):
        on_every_rank(here)
