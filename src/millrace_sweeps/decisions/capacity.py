"""How many of these runs does a host hold at once, and which part of it does each get? Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from millrace.config.schema import Config
from millrace.config.tables.operation import LocalHosts
from millrace.core.placement import Host
from millrace.placement.assign import TIGHT
from millrace.placement.hosts import Layout
from millrace.placement.memory.engine_memory import WORKER_BYTES

Slot = dict[str, str]
"""The environment of the runs that follow each other in one place."""


def at_once(wanted: int | Literal["auto"], config: Config, layout: Layout) -> int:
    """`wanted`, or as many runs as cores, free memory and GPUs hold: at least 1.

    Degenerate:
        A run on a cluster, or on several hosts -> 1: the host here does not say what the others hold.
        `model.device` names one GPU -> 1.
    """
    if wanted != "auto":
        return wanted
    if not isinstance(config.runtime, LocalHosts) or len(layout.placements) > 1:
        return 1
    placed, host = layout.main, layout.main.host
    workers = num_workers(config)
    run_bytes = placed.processes_bytes + placed.relay_bytes + WORKER_BYTES * workers
    fits = [int(TIGHT * host.free_bytes / run_bytes)]
    if placed.device == "cuda":
        fits.append(1 if ":" in config.model.device else len(host.gpus) // max(1, num_gpus(layout)))
    else:
        fits.append(host.cores // workers)
    return max(1, min(fits))


def num_workers(config: Config) -> int:
    """Processes of a run that compute most of the time."""
    replicas = 0 if config.rollout.servers else config.rollout.replicas * config.rollout.tensor
    return config.trainer.ranks + (0 if config.rollout.colocated else replicas)


def num_gpus(layout: Layout) -> int:
    """Different GPUs that a run alone on its host uses."""
    return len({index for _, place, _ in layout.main.workers for index in place.devices or ()})


def slots(num: int, config: Config, layout: Layout) -> list[Slot]:
    """GPUs are divided evenly, and shared if there are fewer than runs. On a CPU the cores decide how many
    threads a worker computes with, unless the environment says it. One run has the host as it is."""
    placed, host = layout.main, layout.main.host
    if num == 1 or not isinstance(config.runtime, LocalHosts):
        return [{} for _ in range(num)]
    if placed.device == "cuda":
        return [{} if ":" in config.model.device else _devices(host, slot, num) for slot in range(num)]
    threads = str(host.threads or max(1, host.cores // (num * num_workers(config))))
    return [{"OMP_NUM_THREADS": threads} for _ in range(num)]


def _devices(host: Host, slot: int, num: int) -> Slot:
    each = max(1, len(host.gpus) // num)
    chosen: Sequence[int] = [slot * each % len(host.gpus) + i for i in range(each)]
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(str(host.gpus[i].index) for i in chosen),
    }
