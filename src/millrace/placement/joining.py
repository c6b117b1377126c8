"""The decision for replicas that join a running run: on which host, on which GPUs. Pure.

Those that are there keep what they have. A further replica goes to the host with the fewest of them that has
room, or with the most where replicas are packed. The first one on a host brings a relay. Room is, on the
host, what the replica keeps there, of the memory that it has in all and of what is free now. On a GPU it is
what nobody was given. A GPU that nobody uses is given whole, as at the start of a run; of a shared one a
replica takes what it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import cast

from msgspec.structs import replace

from millrace.config.schema import Config
from millrace.core.errors import ConfigError
from millrace.core.placement import Place
from millrace.placement.assign import Placement, least_share, processes_bytes, size
from millrace.placement.hosts import Layout

PROCESS_BYTES = 100_000_000
"""Of a replica's process, beside what it keeps. A fork with a small model takes 40 MB that it does not share;
here nobody asked for so many replicas from the start, so it counts."""
ROUNDING = 1e-6


def joining_places(
    config: Config, layout: Layout, there: Sequence[Place], count: int, *, free_bytes: float = inf
) -> list[Place]:
    """Places for `count` replicas beside those that are `there`, on the hosts of `layout.placements`.
    `free_bytes`: of the machine that all hosts are on, now; left out where they are machines of their own.

    Raises: ConfigError: there is no room for all of them. It says what each host lacks.
    """
    found: list[Place] = []
    sign = -1 if config.rollout.packed else 1
    for _ in range(count):
        present, refused = [*there, *found], dict[str, str]()
        for placed in sorted(layout.placements, key=lambda placed: sign * len(_on(placed, present))):
            reason = _lacks_memory(placed, _on(placed, present), free_bytes)
            place = None if reason else _place(config, placed, present)
            if place is not None:
                found.append(place)
                free_bytes -= _new_bytes(placed, _on(placed, present))
                break
            refused[placed.host.name] = reason or "what is left of its GPUs is too little for a replica"
        else:
            told = "; ".join(f"{host}: {reason}" for host, reason in refused.items())
            more = "1 more replica" if count == 1 else f"{count} more replicas: {len(found)} would fit"
            raise ConfigError(f"no room for {more}. On {told}")
    return found


def _on(placed: Placement, places: Sequence[Place]) -> list[Place]:
    return [place for place in places if place.host == placed.relay.host]


def _bytes(placed: Placement) -> int:
    """Of one replica, on its host."""
    return placed.needs.replica.host_bytes + PROCESS_BYTES


def _new_bytes(placed: Placement, there: Sequence[Place]) -> int:
    """What one more replica takes. The first one on a host brings a relay with it."""
    return _bytes(placed) + (0 if there or placed.trains else placed.relay_bytes)


def _lacks_memory(placed: Placement, there: Sequence[Place], free_bytes: float) -> str:
    needs, host, replicas = placed.needs, placed.host, len(there) + 1
    kept = processes_bytes(needs, 0) + replicas * _bytes(placed) + placed.relay_bytes
    if kept > host.memory_bytes:
        return (
            f"{replicas} replicas and what else is there take {size(kept)} of its {size(host.memory_bytes)}"
        )
    if (taken := _new_bytes(placed, there)) > free_bytes:
        return f"a replica takes {size(taken)}, and {size(max(0, free_bytes))} of memory are free"
    return ""


def _place(config: Config, placed: Placement, present: Sequence[Place]) -> Place | None:
    """None: its GPUs have no room."""
    place = replace(placed.relay, devices=(), python=config.rollout.python)
    if placed.device != "cuda" or not placed.host.gpus:
        return place if placed.device != "cuda" else None
    left = {gpu.index: 1.0 for gpu in placed.host.gpus}
    workers = [*([placed.trainer] if placed.trains else []), *_on(placed, present)]
    for worker in workers:
        for device in cast("tuple[int, ...]", worker.devices):
            left[device] -= worker.share
    chosen = sorted(left, key=lambda device: (-round(left[device], 6), device))[: config.rollout.tensor]
    if len(chosen) < config.rollout.tensor:
        return None
    least = max(least_share(gpu, placed.needs) for gpu in placed.host.gpus if gpu.index in chosen)
    room = min(left[device] for device in chosen) + ROUNDING
    share = 1.0 if room >= 1 else least
    return replace(place, devices=tuple(sorted(chosen)), share=share) if share <= room else None
