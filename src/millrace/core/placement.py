"""Where workers run: plain data that a decision writes and a runtime reads."""

from __future__ import annotations

import msgspec

THIS_HOST = "localhost"
"""The controller's own host."""

ROLES = ("trainer", "rollout", "reward")
"""What a host may carry: ranks of the trainer, replicas, reward workers. A relay follows the first two."""

OWN_ADDRESS = "own-address"
"""As an argument of a worker: the runtime puts the address there at which other hosts reach the worker's. The
node of a cluster that is a host may be lost, and another with another address take its place."""


class Place(msgspec.Struct, frozen=True):
    """Where one worker runs.

    A role never names a device. Its process sees the devices of its place and no others. So torch, JAX, NCCL
    or any other library counts them from the first, and a library that opens "the" GPU by itself cannot open
    one that belongs to another worker.

    host     a name; `THIS_HOST` is the controller's
    devices  GPUs there, by their number in `nvidia-smi`; (): none; None: those that the controller may use
    share    of the memory of each device, above 0 and at most 1, what this worker may take
    python   path of an interpreter; None: a fork of a process that has imported the roles already
    environ  variables that it gets beside the controller's
    ranks    processes that make up the worker
    hosts    of the ranks, equally many on each, neighbours together; (): all are on `host`, as the first is
    meet     the address of the first of `hosts`, at which the others reach it
    """

    host: str = THIS_HOST
    devices: tuple[int, ...] | None = None
    share: float = 1.0
    python: str | None = None
    environ: dict[str, str] = {}
    ranks: int = 1
    hosts: tuple[str, ...] = ()
    meet: str = ""

    @property
    def variables(self) -> dict[str, str]:
        """What is set in the worker's environment. CUDA must count as `nvidia-smi` does."""
        if self.devices is None:
            return dict(self.environ)
        visible = ",".join(map(str, self.devices))
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": visible, **self.environ}


HERE = Place()
"""In the controller's surroundings: its host, whatever devices it may use, its Python."""


class Gpu(msgspec.Struct, frozen=True):
    """`index` is its number in `nvidia-smi`. `free_bytes` is what nobody uses at this moment."""

    index: int
    name: str
    memory_bytes: int
    free_bytes: int


class Host(msgspec.Struct, frozen=True):
    """What the processes of a run may use of a host.

    `memory_bytes` is the host's, or the control group's limit if that is less; shared memory is taken from
    it too (the relay's has no other limit: it is a memfd). `free_bytes` is what can be had at this moment.
    `address`: where other hosts reach it; empty: there are none. `roles`: what may run there, of `ROLES`.
    """

    name: str
    cores: int
    memory_bytes: int
    free_bytes: int
    gpus: tuple[Gpu, ...] = ()
    address: str = ""
    roles: tuple[str, ...] = ROLES
