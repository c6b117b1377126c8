"""The processes of one trainer, and this one among them. One process alone starts no group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from millrace.core.errors import WorkerError, boundary

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

COLLECTIVE_TIMEOUT_S = 1800.0  # the longest that ranks of one step lie apart; a dead rank is seen at once
DIMS = ("shard", "sequence", "tensor")


@dataclass(frozen=True, slots=True)
class Ranks:
    """`shard`: ranks among which weights and rows are divided; `sequence`: tokens of a row;
    `tensor`: every matrix and the vocabulary. Neighbours in rank share a tensor group."""

    shard: int = 1
    tensor: int = 1
    sequence: int = 1
    rank: int = 0
    talks_in: Any = None  # a group of torch.distributed; None: the one of all

    @property
    def world(self) -> int:
        return self.shard * self.tensor * self.sequence

    def join(self, rendezvous: str, device: torch.device) -> None:
        """Meet the other ranks at `rendezvous` (`file://` or `tcp://`). Ranks talk by gloo about what lies on
        the CPU, by NCCL about what lies on a GPU. Nothing is done where this process is alone.

        Raises: WorkerError: the others do not come, or are not as many.
        """
        if self.world == 1:
            return
        from torch import distributed

        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)
        with boundary("trainer", f"rank {self.rank} of {self.world}: meet at {rendezvous}", WorkerError):
            distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                init_method=rendezvous,
                rank=self.rank,
                world_size=self.world,
                timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            )
        _mesh(device.type, (self.shard, self.sequence, self.tensor))

    @property
    def mesh(self) -> DeviceMesh | None:
        """Dimensions `DIMS`. None: this process is alone."""
        if self.world == 1:
            return None
        from torch import distributed

        device_type = "cuda" if "nccl" in distributed.get_backend_config() else "cpu"
        return _mesh(device_type, (self.shard, self.sequence, self.tensor))

    def gather(self, value: T) -> list[T]:
        """The small value of every rank, in order of ranks. A collective call: every rank makes it."""
        if self.world == 1:
            return [value]
        from torch import distributed

        values: list[Any] = [None] * self.world
        distributed.all_gather_object(values, value, group=self.talks_in)
        return values

    def apart(self) -> Ranks:
        """The same ranks in a group of their own, for a thread: two threads that use one group abort the job.
        A collective call."""
        if self.world == 1:
            return self
        from torch import distributed

        return replace(self, talks_in=distributed.new_group(backend="gloo"))


ALONE = Ranks()


@cache
def _mesh(device_type: str, shape: tuple[int, ...]) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, shape, mesh_dim_names=DIMS)
