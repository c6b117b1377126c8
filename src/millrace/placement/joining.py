"""The decision for replicas that join a running run: the host and the GPUs of each. Pure.

Present replicas keep their places. A joining replica goes to the host with room that has the fewest replicas;
packed replicas go to the host with the most. The first replica on a host brings a relay. A host has room if a
replica's memory fits into the host's memory and into the memory that is free now. A GPU's room is the share
that no worker has. A replica gets the whole of an unused GPU, as at the start of a run, and its least share
of a shared GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple, cast

from msgspec.structs import replace

from millrace.config.schema import Config
from millrace.core.errors import ConfigError
from millrace.core.placement import Host, Place
from millrace.placement.assign import Placement, least_share, size
from millrace.placement.hosts import Layout
from millrace.placement.memory.engine_memory import FORK_BYTES

ROUNDING = 1e-6
NEW_LOOK_S = 20.0
"""For nodes that appear while a run goes on: the controller waits for the answer."""


class Present(NamedTuple):
    """`spare` hosts that nobody uses, the names of `lost` hosts, and why some nodes cannot be used."""

    spare: tuple[Host, ...] = ()
    lost: frozenset[str] = frozenset()
    problems: tuple[str, ...] = ()


def joining_places(
    config: Config, layout: Layout, there: Sequence[Place], count: int, *, free_bytes: float = inf
) -> list[Place]:
    """Places for `count` joining replicas beside the replicas `there`, on the hosts of `layout.placements`.
    `free_bytes`: of the machine if all hosts are on one machine; left out if each host is a machine.

    Raises: ConfigError: there is no room for all of them. The message says what each host lacks.
    """
    joined: list[Place] = []
    sign = -1 if config.rollout.packed else 1
    for _ in range(count):
        present, refused = [*there, *joined], dict[str, str]()
        for placed in sorted(layout.placements, key=lambda placed: sign * len(_on(placed, present))):
            reason = _lacks_memory(placed, _on(placed, present), free_bytes)
            place = None if reason else _place(config, placed, present)
            if place is not None:
                joined.append(place)
                free_bytes -= _new_bytes(placed, _on(placed, present))
                break
            refused[placed.host.name] = reason or "what is left of its GPUs is too little for a replica"
        else:
            reasons = "; ".join(f"{host}: {reason}" for host, reason in refused.items())
            more = "1 more replica" if count == 1 else f"{count} more replicas: {len(joined)} would fit"
            raise ConfigError(f"no room for {more}. On {reasons}")
    return joined


def _on(placed: Placement, places: Sequence[Place]) -> list[Place]:
    return [place for place in places if place.host == placed.relay.host]


def _bytes(placed: Placement) -> int:
    """Bytes of one replica on its host."""
    return placed.needs.replica.host_bytes + FORK_BYTES


def _new_bytes(placed: Placement, there: Sequence[Place]) -> int:
    """Bytes that one more replica takes. The first replica on a host brings a relay with it."""
    return _bytes(placed) + (0 if there or placed.trains else placed.relay_bytes)


def _lacks_memory(placed: Placement, there: Sequence[Place], free_bytes: float) -> str:
    needs, host, replicas = placed.needs, placed.host, len(there) + 1
    total = needs.processes_bytes(0) + replicas * _bytes(placed) + placed.relay_bytes
    if total > host.memory_bytes:
        return (
            f"{replicas} replicas and what else is there take {size(total)} of its {size(host.memory_bytes)}"
        )
    if (new := _new_bytes(placed, there)) > free_bytes:
        return f"a replica takes {size(new)}, and {size(max(0, free_bytes))} of memory are free"
    return ""


def _place(config: Config, placed: Placement, present: Sequence[Place]) -> Place | None:
    """A replica's place on the host. None: the GPUs of the host have no room."""
    place = replace(placed.relay, devices=(), python=config.rollout.python)
    if placed.device != "cuda" or not placed.host.gpus:
        return place if placed.device != "cuda" else None
    free = {gpu.index: 1.0 for gpu in placed.host.gpus}
    workers = [*([placed.trainer] if placed.trains else []), *_on(placed, present)]
    for worker in workers:
        for device in cast("tuple[int, ...]", worker.devices):
            free[device] -= worker.share
    chosen = sorted(free, key=lambda device: (-round(free[device], 6), device))[: config.rollout.tensor]
    if len(chosen) < config.rollout.tensor:
        return None
    least = max(least_share(gpu, placed.needs) for gpu in placed.host.gpus if gpu.index in chosen)
    room = min(free[device] for device in chosen) + ROUNDING
    share = 1.0 if room >= 1 else least
    return replace(place, devices=tuple(sorted(chosen)), share=share) if share <= room else None
