"""The decision over several hosts: who is on which. Pure. On each of them `assign` divides what it has.

The ranks of the trainer are on the first `trainer.hosts` hosts that have room for their equal parts. Replicas
are spread: each goes to where the least of the room is taken; packed, they fill one host after the other.
Room is what the trainer leaves of a host's GPUs, or of its cores where nobody has GPUs. Reward workers go
round all hosts. A host with ranks or replicas has a relay. A host takes what its roles allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

import msgspec

from millrace.config.schema import Config
from millrace.core.errors import ConfigError
from millrace.core.placement import HERE, Host, Place
from millrace.placement.assign import Placement, assign, uses_gpus
from millrace.placement.needs import MemoryNeed, Needs

NOBODY = MemoryNeed(0, 0)


@dataclass(frozen=True)
class Layout:
    """Everybody's place. `placements` are of the hosts that have a relay, the trainer's first. The others are
    `spare`. `trainer` has all ranks, on however many hosts."""

    placements: tuple[Placement, ...]
    trainer: Place
    replicas: tuple[Place, ...]
    reward_workers: tuple[Place, ...]
    spare: tuple[Host, ...] = ()

    @property
    def main(self) -> Placement:
        """Of the trainer's first host."""
        return self.placements[0]


def computes_on_gpus(config: Config, hosts: Sequence[Host]) -> bool:
    """Raises: ConfigError: `model.device` asks for a GPU, and no host has one."""
    return any(host.gpus and uses_gpus(config, host) for host in hosts) or uses_gpus(config, hosts[0])


def lay_out(config: Config, hosts: Sequence[Host], needs: Needs) -> Layout:
    """Places for all workers of `config` on `hosts`, the controller's first.

    Raises: ConfigError: no host has room for the trainer, or one is too small for what is kept there.
    """
    on_gpu = computes_on_gpus(config, hosts)
    mains = trainer_hosts(config, hosts, on_gpu=on_gpu)
    chosen = spread(config, hosts, mains, on_gpu=on_gpu)
    used = [*mains, *(i for i in range(len(hosts)) if i in chosen and i not in mains)]
    placements = [
        _part(
            config,
            hosts[index],
            needs,
            replicas=chosen.count(index),
            trains=index in mains,
            alone=len(hosts) == 1,
        )
        for index in used
    ]
    if len(hosts) > 1:
        placements = [placed.at(placed.host.name) for placed in placements]
    left = {index: iter(placed.replicas) for index, placed in zip(used, placements, strict=True)}
    workers = islice(cycle(allowed(hosts, "reward")), config.reward.most_workers)
    return Layout(
        placements=tuple(placements),
        trainer=_together(placements[: len(mains)]),
        replicas=tuple(next(left[index]) for index in chosen),
        reward_workers=tuple(HERE if host is hosts[0] else Place(host=host.name) for host in workers),
        spare=tuple(host for index, host in enumerate(hosts) if index not in used),
    )


def added(config: Config, host: Host, main: Placement) -> Placement | None:
    """Of a host that replicas may join on, beside the trainer's. None: they may not, or need GPUs there.

    Raises: ConfigError: its memory is too small for a relay.
    """
    if "rollout" not in host.roles or (main.device == "cuda" and not host.gpus):
        return None
    return _part(config, host, main.needs, replicas=0, trains=False, alone=False).at(host.name)


def allowed(hosts: Sequence[Host], role: str) -> list[Host]:
    """Those that `role` may run on. Raises: ConfigError: there is none."""
    found = [host for host in hosts if role in host.roles]
    if not found:
        names = ", ".join(host.name for host in hosts)
        raise ConfigError(
            f"the role `{role}` has no host: the labels of {names} do not allow it\n"
            "  Add a host whose label does"
        )
    return found


def trainer_hosts(config: Config, hosts: Sequence[Host], *, on_gpu: bool) -> list[int]:
    """The first ones that have a GPU for each of their ranks; on CPUs the first ones.

    Raises: ConfigError: they are too few.
    """
    trainer, able = config.trainer, allowed(hosts, "trainer")
    if len(able) < trainer.hosts:
        raise ConfigError(
            f"`trainer.hosts` ({trainer.hosts}) is more than the {len(able)} hosts that it may be on.\n"
            "  Lower it, or add hosts: `runtime.hosts`, or nodes of the cluster"
        )
    needed = trainer.ranks_of_host if on_gpu and len(hosts) > 1 else 0
    found = [index for index, host in enumerate(hosts) if host in able and len(host.gpus) >= needed]
    if len(found) < trainer.hosts:
        gpus = [len(host.gpus) for host in able]
        raise ConfigError(
            f"the trainer has {trainer.ranks} ranks, each with a GPU, on {trainer.hosts} of the hosts, which "
            f"have {gpus} GPUs.\n  Lower `trainer.shard` x `trainer.tensor` x `trainer.sequence`, or divide "
            "them among more `trainer.hosts`"
        )
    return found[: trainer.hosts]


def spread(config: Config, hosts: Sequence[Host], mains: Sequence[int], *, on_gpu: bool) -> list[int]:
    """The host of each replica, as a position in `hosts`."""
    able = allowed(hosts, "rollout")
    room = [
        _room(config, host, index in mains, on_gpu=on_gpu) if host in able else 0
        for index, host in enumerate(hosts)
    ]
    if not any(room) and hosts[mains[0]] not in able:
        raise ConfigError(
            "no GPU is left for replicas: no host with the role `rollout` has one that the trainer leaves\n"
            "  Add such a host, or let the trainer's have this role too"
        )
    if not any(room):
        room[mains[0]] = 1
    taken, chosen = [0] * len(hosts), list[int]()

    def order(index: int) -> tuple[float, int]:
        full = (taken[index] + 1) / room[index]
        return (0.0 if config.rollout.packed and full <= 1 else full), index

    for _ in range(config.rollout.replicas):
        best = min((i for i in range(len(hosts)) if room[i]), key=order)
        taken[best] += 1
        chosen.append(best)
    return chosen


def _room(config: Config, host: Host, trains: bool, *, on_gpu: bool) -> int:
    ranks = config.trainer.ranks_of_host if trains else 0
    if on_gpu and not config.rollout.servers:
        return max(0, len(host.gpus) - ranks) // config.rollout.tensor
    return max(1, host.cores - ranks)


def _part(config: Config, host: Host, needs: Needs, *, replicas: int, trains: bool, alone: bool) -> Placement:
    """Of one host."""
    rollout = config.rollout.model_copy(update={"replicas": replicas})
    part, kept = config.model_copy(update={"rollout": rollout}), needs.trainer
    ours = MemoryNeed(kept.device_bytes, kept.host_bytes // config.trainer.hosts) if trains else NOBODY
    reference = needs.reference if trains else NOBODY
    needs = replace(needs, trainer=ours, reference=reference)
    return assign(part, host, needs, trains=trains, alone=alone)


def _together(parts: Sequence[Placement]) -> Place:
    """The trainer's place: its ranks on one host, or on several."""
    places = [part.trainer for part in parts]
    if len(parts) == 1:
        return places[0]
    return msgspec.structs.replace(
        places[0],
        devices=tuple(device for place in places for device in place.devices or ()),
        share=min(place.share for place in places),
        ranks=sum(place.ranks for place in places),
        hosts=tuple(place.host for place in places),
        meet=parts[0].host.address,
    )


def split(host: Host, count: int, address: str) -> tuple[Host, ...]:
    """`count` logical hosts of one machine, which reach each other at `address`: each has an equal part of
    its memory, and its GPUs and cores as evenly as they go."""
    if count == 1:
        return (host,)
    names = [host.name, *(f"host-{number}" for number in range(1, count))]
    return tuple(
        msgspec.structs.replace(
            host,
            name=name,
            cores=max(1, host.cores // count),
            memory_bytes=host.memory_bytes // count,
            free_bytes=host.free_bytes // count,
            gpus=host.gpus[len(host.gpus) * i // count : len(host.gpus) * (i + 1) // count],
            address=address,
        )
        for i, name in enumerate(names)
    )
