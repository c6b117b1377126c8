"""Where workers run: plain data that a decision writes and a runtime reads."""

from __future__ import annotations

import msgspec

THIS_HOST = "localhost"
"""The controller's own host."""

ROLES = ("trainer", "rollout", "reward")
"""What may run on a host: ranks of the trainer, replicas, reward workers. A relay goes with the first two."""

OWN_ADDRESS = "own-address"
"""An argument of a worker that the runtime replaces with the address of the worker's host. Only the runtime
knows the address: if a node of a cluster is lost, a node with another address may take its place."""


class Place(msgspec.Struct, frozen=True):
    """Where one worker runs.

    A role never names a device. Its process sees the devices of its place and no others. So torch, JAX, NCCL
    and other libraries count the devices from 0. A library that opens "the" GPU by itself cannot open the GPU
    of another worker.

    host     a name; `THIS_HOST` is the controller's
    devices  GPUs of the host, by their number in `nvidia-smi`; (): none; None: those of the controller
    share    of the memory of each device that this worker may take, above 0 and at most 1
    python   path of an interpreter; None: a fork of a process that has imported the roles already
    environ  environment variables in addition to the controller's
    ranks    processes that make up the worker
    hosts    of the ranks, equally many on each, neighbours together; (): all are on `host`, as the first is
    meet     the address of the first of `hosts`, at which the ranks of other hosts reach it
    threads  of torch in each rank, on a CPU; None: as many as the controller's environment says, or 1
    """

    host: str = THIS_HOST
    devices: tuple[int, ...] | None = None
    share: float = 1.0
    python: str | None = None
    environ: dict[str, str] = {}
    ranks: int = 1
    hosts: tuple[str, ...] = ()
    meet: str = ""
    threads: int | None = None

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of the worker. CUDA must number devices as `nvidia-smi` does."""
        variables = {} if self.threads is None else {"OMP_NUM_THREADS": str(self.threads)}
        if self.devices is not None:
            variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.devices))
        return variables | self.environ


HERE = Place()
"""The controller's own place: its host, the devices that it may use, its Python."""


class Gpu(msgspec.Struct, frozen=True):
    """`index`: its number in `nvidia-smi`. `free_bytes`: memory that no process uses at this moment."""

    index: int
    name: str
    memory_bytes: int
    free_bytes: int


class Host(msgspec.Struct, frozen=True):
    """What the processes of a run may use of a host.

    `memory_bytes`: of the host, or the limit of the control group if that is less. Shared memory counts too
    (the relay's has no other limit: it is a memfd). `free_bytes`: memory that is free at this moment.
    `address`: where other hosts reach this host; empty: there are none. `roles`: those of `ROLES` that may
    run here. `threads`: of torch in each worker, if the environment says how many, else 0.
    """

    name: str
    cores: int
    memory_bytes: int
    free_bytes: int
    gpus: tuple[Gpu, ...] = ()
    address: str = ""
    roles: tuple[str, ...] = ROLES
    threads: int = 0
