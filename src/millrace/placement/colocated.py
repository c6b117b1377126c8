"""The decision for one device in turns (`rollout.colocated`). Pure.

Trainer and replicas use the same GPUs, or all cores. A worker that sleeps keeps nothing but the context of
its process on a GPU. So a turn has the memory of one side.
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace.core.errors import ConfigError
from millrace.core.placement import Gpu
from millrace.placement.needs import Needs

SLEEPING_BYTES = 500_000_000
"""Memory of a GPU that the process of a worker keeps while it sleeps: the context of CUDA."""


def colocated_devices(replicas: int, each: int, ranks: int, gpus: int) -> list[tuple[int, ...]]:
    """Positions of the trainer's GPUs, one for each rank. Then the positions of each replica's GPUs, `each`
    for a replica, among all GPUs.

    Raises: ConfigError: there are too few GPUs for one side.
    """
    if max(each, ranks) > gpus:
        raise ConfigError(
            f"`rollout.colocated` (true): the trainer has {ranks} ranks with a GPU each, and a replica has "
            f"{each} GPUs (`rollout.tensor`); this host has {gpus}.\n  Lower them to at most {gpus}"
        )
    sets = gpus // each
    firsts = (replica % sets * each for replica in range(replicas))
    return [tuple(range(ranks)), *(tuple(range(first, first + each)) for first in firsts)]


def colocated_share(worker: int, gpus: Sequence[tuple[int, ...]], gpu: Gpu, needs: Needs) -> float:
    """The worker's share of the memory of each of its GPUs in its turn. Worker 0 is the trainer."""
    replicas = [used for used in gpus[1:] if set(used) & set(gpus[worker])]
    same = 1 if worker == 0 else len(replicas)
    other = len(replicas) if worker == 0 else int(bool(set(gpus[0]) & set(gpus[worker])))
    return max(0.0, 1 - other * SLEEPING_BYTES / gpu.memory_bytes) / same


def turn_bytes(needs: Needs, replicas: int) -> int:
    """Host memory of the processes in the larger turn, without shared memory. A trainer that sleeps on a GPU
    is in the memory of the host; one that sleeps on a CPU is in a file."""
    asleep = needs.trainer.device_bytes
    return max(needs.trainer.host_bytes, asleep + replicas * needs.replica.host_bytes)
