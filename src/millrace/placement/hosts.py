"""The decision over several hosts: the host of each worker, and the host and the GPUs of each replica that
joins a running run. Pure. On each host `assign` divides its devices.

The ranks of the trainer are on the first `trainer.hosts` hosts that have room for an equal share of them.
Replicas are spread: each goes to the host with the largest free fraction of its room. Packed replicas fill
one host after the other. Room is the GPUs of a host that the trainer leaves, or its cores if no host has
GPUs. Reward workers go round all hosts. A host with ranks or replicas has a relay. The roles of a host say
which workers it takes.

Present replicas keep their places. A joining replica goes to the host with room that has the fewest replicas;
packed replicas go to the host with the most. The first replica on a host brings a relay. A host has room if a
replica's memory fits into the host's memory and into the memory that is free now. A GPU's room is the share
that no worker has. A replica gets the whole of an unused GPU, as at the start of a run, and its least share
of a shared GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from math import inf
from typing import NamedTuple, cast

import msgspec

from millrace.config.schema import Config
from millrace.core.errors import ConfigError
from millrace.core.placement import HERE, Host, Place
from millrace.placement.assign import Placement, assign, least_share, size, uses_gpus
from millrace.placement.memory.engine_memory import FORK_BYTES, NOTHING, MemoryNeed
from millrace.placement.memory.needs import Needs


@dataclass(frozen=True)
class Layout:
    """The place of every worker. `placements` are of the hosts that have a relay, the trainer's first. The
    other hosts are `spare`. `trainer` has all ranks, on one host or several."""

    placements: tuple[Placement, ...]
    trainer: Place
    replicas: tuple[Place, ...]
    reward_workers: tuple[Place, ...]
    spare: tuple[Host, ...] = ()

    @property
    def main(self) -> Placement:
        """The placement of the trainer's first host."""
        return self.placements[0]


def computes_on_gpus(config: Config, hosts: Sequence[Host]) -> bool:
    """Whether workers compute on GPUs. Raises: ConfigError: `model.device` asks for a GPU, and no host has
    one."""
    return any(host.gpus and uses_gpus(config, host) for host in hosts) or uses_gpus(config, hosts[0])


def lay_out(config: Config, hosts: Sequence[Host], needs: Needs) -> Layout:
    """Places for all workers of `config` on `hosts`, the controller's first.

    Raises: ConfigError: no host has room for the trainer, or a host's memory is too small.
    """
    on_gpu = computes_on_gpus(config, hosts)
    mains = trainer_hosts(config, hosts, on_gpu=on_gpu)
    chosen = spread(config, hosts, mains, on_gpu=on_gpu)
    used = [*mains, *(i for i in range(len(hosts)) if i in chosen and i not in mains)]
    placements = [
        _assign_host(
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
    places = {index: iter(placed.replicas) for index, placed in zip(used, placements, strict=True)}
    workers = islice(cycle(allowed(hosts, "reward")), config.reward.most_workers)
    return Layout(
        placements=tuple(placements),
        trainer=_together(placements[: len(mains)]),
        replicas=tuple(next(places[index]) for index in chosen),
        reward_workers=tuple(HERE if host is hosts[0] else Place(host=host.name) for host in workers),
        spare=tuple(host for index, host in enumerate(hosts) if index not in used),
    )


def added(config: Config, host: Host, main: Placement) -> Placement | None:
    """The placement of a host that replicas may join on. None: they may not, or the host lacks the GPUs.

    Raises: ConfigError: the host's memory is too small for a relay.
    """
    if "rollout" not in host.roles or (main.device == "cuda" and not host.gpus):
        return None
    return _assign_host(config, host, main.needs, replicas=0, trains=False, alone=False).at(host.name)


def allowed(hosts: Sequence[Host], role: str) -> list[Host]:
    """The hosts that `role` may run on. Raises: ConfigError: there is none."""
    able = [host for host in hosts if role in host.roles]
    if not able:
        names = ", ".join(host.name for host in hosts)
        raise ConfigError(
            f"the role `{role}` has no host: the labels of {names} do not allow it\n"
            "  Add a host whose label does"
        )
    return able


def trainer_hosts(config: Config, hosts: Sequence[Host], *, on_gpu: bool) -> list[int]:
    """The trainer's hosts: the first that have a GPU for each of their ranks; on CPUs the first hosts.

    Raises: ConfigError: there are too few hosts.
    """
    trainer, able = config.trainer, allowed(hosts, "trainer")
    if len(able) < trainer.hosts:
        raise ConfigError(
            f"`trainer.hosts` ({trainer.hosts}) is more than the {len(able)} hosts that it may be on.\n"
            "  Lower it, or add hosts: `runtime.hosts`, or nodes of the cluster"
        )
    needed = trainer.ranks_of_host if on_gpu and len(hosts) > 1 else 0
    fit = [index for index, host in enumerate(hosts) if host in able and len(host.gpus) >= needed]
    if len(fit) < trainer.hosts:
        gpus = [len(host.gpus) for host in able]
        raise ConfigError(
            f"the trainer has {trainer.ranks} ranks, each with a GPU, on {trainer.hosts} of the hosts, which "
            f"have {gpus} GPUs.\n  Lower `trainer.shard` x `trainer.tensor` x `trainer.sequence`, or divide "
            "them among more `trainer.hosts`"
        )
    return fit[: trainer.hosts]


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
    counts, chosen = [0] * len(hosts), list[int]()

    def order(index: int) -> tuple[float, int]:
        full = (counts[index] + 1) / room[index]
        return (0.0 if config.rollout.packed and full <= 1 else full), index

    for _ in range(config.rollout.replicas):
        best = min((i for i in range(len(hosts)) if room[i]), key=order)
        counts[best] += 1
        chosen.append(best)
    return chosen


def _room(config: Config, host: Host, trains: bool, *, on_gpu: bool) -> int:
    ranks = config.trainer.ranks_of_host if trains else 0
    if on_gpu and not config.rollout.servers:
        return max(0, len(host.gpus) - ranks) // config.rollout.tensor
    return max(1, host.cores - ranks)


def _assign_host(
    config: Config, host: Host, needs: Needs, *, replicas: int, trains: bool, alone: bool
) -> Placement:
    """The placement of one host, with its share of the replicas and of the trainer."""
    rollout = config.rollout.model_copy(update={"replicas": replicas})
    of_host, all_ranks = config.model_copy(update={"rollout": rollout}), needs.trainer
    host_bytes = all_ranks.host_bytes // config.trainer.hosts
    trainer = MemoryNeed(all_ranks.device_bytes, host_bytes) if trains else NOTHING
    reference = needs.reference if trains else NOTHING
    needs = replace(needs, trainer=trainer, reference=reference)
    return assign(of_host, host, needs, trains=trains, alone=alone)


def _together(placements: Sequence[Placement]) -> Place:
    """The trainer's place, with its ranks on all hosts of `placements`."""
    places = [placed.trainer for placed in placements]
    if len(places) == 1:
        return places[0]
    return msgspec.structs.replace(
        places[0],
        devices=tuple(device for place in places for device in place.devices or ()),
        share=min(place.share for place in places),
        ranks=sum(place.ranks for place in places),
        hosts=tuple(place.host for place in places),
        meet=placements[0].host.address,
    )


def split(host: Host, count: int, address: str) -> tuple[Host, ...]:
    """`count` logical hosts of one machine, which reach each other at `address`. Each has an equal share of
    the machine's memory, and its GPUs and cores are divided as evenly as possible."""
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


# ---------------------------------------------------------------- replicas that join


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
    place = msgspec.structs.replace(placed.relay, devices=(), python=config.rollout.python)
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
    if share > room:
        return None
    return msgspec.structs.replace(place, devices=tuple(sorted(chosen)), share=share)
