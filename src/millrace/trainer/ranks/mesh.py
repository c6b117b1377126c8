"""The ranks of one trainer: its processes, and the place of this process among them. One process alone starts
no group."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

from millrace.core.errors import MillraceError, StorageError, WorkerError, boundary

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


T = TypeVar("T")
Fault = tuple[type[MillraceError], str]

M_MMAP_THRESHOLD = -3  # of glibc
MMAP_THRESHOLD = M_MMAP_THRESHOLD, 1 << 20
"""Tensors from this size on get pages of their own. Every layer allocates and frees whole weights, which
would leave a heap full of holes."""
COLLECTIVE_TIMEOUT_S = 1800.0  # the longest wait of a rank for another in a step; a dead rank is seen at once


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks, and the rank of this process. `shard` ranks divide weights and rows among them, `sequence`
    ranks the tokens of a row, `tensor` ranks every matrix and the vocabulary. Neighbours share a tensor
    group."""

    shard: int = 1
    tensor: int = 1
    sequence: int = 1
    rank: int = 0
    hosts: int = 1  # each has equally many ranks, neighbours together
    offload: bool = False  # weights are on the host while a GPU computes; one process is then a mesh of one
    process_group: Any = None  # a group of torch.distributed; None: the group of all ranks

    @property
    def world(self) -> int:
        return self.shard * self.tensor * self.sequence

    @property
    def alone(self) -> bool:
        """Whether this process has whole weights on its device, and starts no group."""
        return self.world == 1 and not self.offload

    @property
    def undivided_matmuls(self) -> bool:
        """Whether this process multiplies whole rows with whole matrices."""
        return self.tensor == self.sequence == 1

    @property
    def tensor_index(self) -> int:
        """The index of this rank's block of matrices. Ranks that differ only in this index see the same
        tokens."""
        return self.rank % self.tensor

    @property
    def sequence_index(self) -> int:
        return self.rank // self.tensor % self.sequence

    @property
    def shard_index(self) -> int:
        return self.rank // (self.tensor * self.sequence)

    @property
    def host(self) -> int:
        """The number of this rank's host."""
        return self.rank * self.hosts // self.world

    @property
    def leader(self) -> int:
        """The first rank of this rank's host."""
        return self.host * self.world // self.hosts

    def join(self, rendezvous: str | None, device: torch.device, network: str = "") -> None:
        """Meet the other ranks at `rendezvous` (`file://` or `tcp://`; None: there are none). Ranks exchange
        tensors of the CPU by gloo, and tensors of a GPU by NCCL. Ranks on several hosts use the network
        interface that reaches `network`. Nothing is done if this process is `alone`.

        Raises: WorkerError: other ranks do not come, or their number differs.
        """
        if self.alone:
            return
        import torch
        from torch import distributed

        cuda = device.type == "cuda"
        if rendezvous is None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # so that no other host reaches the process
        elif network and "GLOO_SOCKET_IFNAME" not in os.environ:
            os.environ["GLOO_SOCKET_IFNAME"] = interface = interface_to(network)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        if cuda:
            torch.cuda.set_device(device)
        else:
            ctypes.CDLL(None).mallopt(*MMAP_THRESHOLD)
        with boundary("trainer", f"rank {self.rank} of {self.world}: meet at {rendezvous}", WorkerError):
            store = _store(rendezvous, self.rank, self.world)
            distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                init_method=None if store else rendezvous,
                store=store,
                rank=self.rank,
                world_size=self.world,
                timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            )
        self._connect(device)

    def _connect(self, device: torch.device) -> None:
        """Make the groups of the meshes, and their connections. NCCL would connect in the first step, and so
        after the death of a trainer whose standby waits."""
        import torch
        from torch import distributed

        assert self.mesh is not None and self.weights_mesh is not None
        for group in (self.weights_mesh.get_group("weights"), self.group("tensor"), self.group("sequence")):
            if group is not None and group.size() > 1:
                distributed.all_reduce(torch.zeros(1, device=device), group=group)

    @property
    def mesh(self) -> DeviceMesh | None:
        """Dimensions "shard", "sequence", "tensor". None: this process is alone."""
        names = "shard", "sequence", "tensor"
        return _mesh((self.shard, self.sequence, self.tensor), names) if not self.alone else None

    @property
    def weights_mesh(self) -> DeviceMesh | None:
        """Dimensions "weights" and "tensor", along which weights are divided. Ranks that share a row's tokens
        have different weights."""
        shape = self.shard * self.sequence, self.tensor
        return _mesh(shape, ("weights", "tensor")) if not self.alone else None

    def group(self, name: str) -> ProcessGroup | None:
        """This rank's neighbours in a dimension of `mesh`. None: the rank has no neighbour."""
        mesh = self.mesh
        return None if mesh is None or mesh[name].size() == 1 else mesh.get_group(name)

    def gather(self, value: T) -> list[T]:
        """The small value of every rank, in order of ranks. A collective call: every rank makes it."""
        if self.world == 1:
            return [value]
        from torch import distributed

        values: list[Any] = [None] * self.world
        distributed.all_gather_object(values, value, group=self.process_group)
        return values

    def broadcast(self, value: T) -> T:
        """The first rank's small value. The first rank does not wait. A collective call."""
        if self.world == 1:
            return value
        import torch
        from torch import distributed

        values = [value]
        distributed.broadcast_object_list(values, src=0, group=self.process_group, device=torch.device("cpu"))
        return values[0]

    def in_own_group(self) -> Ranks:
        """The same ranks in a group of their own, for a thread: two threads that use one group abort the job.
        A collective call."""
        if self.world == 1:
            return self
        from torch import distributed

        return replace(self, process_group=distributed.new_group(backend="gloo"))


ALONE = Ranks()


@contextmanager
def all_or_none(ranks: Ranks) -> Iterator[None]:
    """An error on one rank is raised on every rank, so that no rank waits for a rank that has given up.

    A collective call: every rank makes it.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    _raise_first(ranks.gather(_fault(ranks, mine)), mine)


def agreed(ranks: Ranks, work: Callable[[], T]) -> list[T]:
    """The small results of `work` on every rank. A collective call that raises as `all_or_none`."""
    answer, mine = _tried(work)
    answers = ranks.gather((answer, _fault(ranks, mine)))
    _raise_first([fault for _, fault in answers], mine)
    return [cast(T, answer) for answer, _ in answers]


def first_alone(ranks: Ranks, work: Callable[[], T]) -> T:
    """The result of `work` on the first rank, which alone calls it. Raises as `all_or_none`."""
    answer, mine = _tried(work) if ranks.rank == 0 else (None, None)
    answer, fault = ranks.broadcast((answer, _fault(ranks, mine)))
    _raise_first([fault], mine)
    return cast(T, answer)


def _tried(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _fault(ranks: Ranks, error: Exception | None) -> Fault | None:
    if error is None:
        return None
    if isinstance(error, MillraceError):
        return type(error), str(error)
    kind = StorageError if isinstance(error, OSError) else WorkerError
    return kind, f"rank {ranks.rank}: {type(error).__name__}: {error}"


def _raise_first(faults: Iterable[Fault | None], mine: Exception | None) -> None:
    if mine is not None:
        raise mine
    for kind, text in filter(None, faults):
        raise kind(text)


def _store(rendezvous: str | None, rank: int, world: int) -> Any:
    """The store where ranks meet without a shared file. Rank 0 already listens with the descriptor
    MILLRACE_LISTENS, only at its host's address. None: ranks meet at a file."""
    from torch import distributed

    if rendezvous is None:
        return distributed.HashStore()
    if not rendezvous.startswith("tcp://"):
        return None
    host, _, port = rendezvous.removeprefix("tcp://").rpartition(":")
    listens = int(os.environ["MILLRACE_LISTENS"]) if rank == 0 else None
    return distributed.TCPStore(
        host,
        int(port),
        world,
        is_master=rank == 0,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        master_listen_fd=listens,
    )


@cache
def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    device_type = "cuda" if "nccl" in distributed.get_backend_config() else "cpu"
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's block of a tensor, without its history: all of a plain tensor. The block shares the
    tensor's memory."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


SIOCGIFADDR = 0x8915  # of Linux: an interface's IPv4 address
NAME_BYTES_MAX = 15


def interface_to(address: str) -> str:
    """The name of the interface over which this host reaches `address`, which may be its own. Nothing is
    sent.

    Raises: WorkerError: there is none.
    """
    source = ""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))
        source = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            if _address(probe, name) == source:
                return name
    raise WorkerError(
        f"no network interface here has {source or 'an address'} that reaches {address}, where the ranks of "
        "the trainer meet\n  Set GLOO_SOCKET_IFNAME, and with GPUs NCCL_SOCKET_IFNAME, on every host"
    )


def _address(probe: socket.socket, name: str) -> str:
    request = struct.pack("256s", name.encode()[:NAME_BYTES_MAX])
    with suppress(OSError):  # the interface has no IPv4 address
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
    return ""
