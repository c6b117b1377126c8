"""The decision on one host: the place and the memory of each worker. Pure: a host and a configuration go in.

GPUs. If there are enough GPUs, each rank of the trainer gets a GPU of its own, and each replica
`rollout.tensor` GPUs. With fewer GPUs the trainer keeps its own, and the replicas share the others evenly.
With one GPU all workers share it, all at once or in turns (`colocated`). A replica's memory is known from its
engine (`memory.engine_memory`). So a replica gets that memory and a tenth more, or its activation memory if
that is larger. The trainer gets the rest, because its activation memory is only estimated.

Cores. No worker is bound to a core, and the kernel moves a thread to a free core. A fixed division would
leave cores idle while their worker waits. `placement.thread_plan` has the number of threads of a worker.

Versions in the relay. Two versions are enough to run: replicas read one, the trainer writes the other. With
more versions a trajectory whose replica died goes on under its version. The relay keeps as many as are useful
and as there is room for. Its room is `SHARED_FRACTION` of the host's memory that processes leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from millrace.config.schema import Config
from millrace.core.errors import ConfigError
from millrace.core.placement import Gpu, Host, Place
from millrace.placement.memory.engine_memory import CONTEXT_BYTES, LIBRARIES_BYTES
from millrace.placement.memory.needs import MemoryNeed, Needs
from millrace.placement.thread_plan import replica_threads, tokens_at_once, trainer_threads

WORKSPACE = 1.1
"""The least factor of a replica's memory over the memory that it keeps. Activation memory may need more."""
SHARED_FRACTION = 0.5
LARGE_BYTES = 64 << 20
"""Bytes of a large version. The relay keeps smaller versions whole, as many as are useful."""
VERSIONS_MIN = 2
TIGHT = 0.95
"""There is a warning above this fraction of a share or of the free memory."""


@dataclass(frozen=True)
class Placement:
    """The places on one host. `device` is the device of every role: `cuda` (the first that it sees) or
    `cpu`."""

    host: Host
    needs: Needs
    device: str
    trainer: Place
    relay: Place
    replicas: tuple[Place, ...]
    relay_slots: int
    relay_slots_max: int
    relay_versions: int = 0
    trains: bool = True
    colocated: bool = False

    def at(self, name: str) -> Placement:
        """The placement with the host's name in every place."""
        places = (self.trainer, self.relay, *self.replicas)
        trainer, relay, *replicas = (msgspec.structs.replace(place, host=name) for place in places)
        return replace(self, trainer=trainer, relay=relay, replicas=tuple(replicas))

    @property
    def workers(self) -> list[tuple[str, Place, MemoryNeed]]:
        """The workers that compute. The trainer is the first, if it is on this host."""
        replicas = [(f"replica-{i}", place, self.needs.replica) for i, place in enumerate(self.replicas)]
        trainer = ("the trainer", self.trainer, self.needs.trainer)
        return [trainer, *replicas] if self.trains else replicas

    @property
    def relay_bytes(self) -> int:
        """Bytes of whole versions. If more versions are useful, half a version is added for older deltas."""
        version = self.needs.weights_bytes
        return self.relay_slots * version + (version // 2 if self.relay_keeps_deltas else 0)

    @property
    def relay_keeps_deltas(self) -> bool:
        return self.relay_versions > self.relay_slots

    @property
    def older_bytes(self) -> int:
        """Bytes of a replica's process while it reads a version that its relay keeps as a delta."""
        return self.needs.weights_bytes if self.relay_keeps_deltas else 0

    @property
    def rank_peak_bytes(self) -> int:
        """The most memory of a rank of the trainer on its device, beside Python and torch."""
        need = self.needs.trainer
        each = need.device_bytes if self.device == "cuda" else need.host_bytes // self.trainer.ranks
        return each + self.needs.activation_memory.trainer_bytes

    @property
    def processes_bytes(self) -> int:
        """Host memory of trainer, reference and replicas, without shared memory."""
        if self.colocated:
            return self.needs.turn_bytes(len(self.replicas))
        return self.needs.processes_bytes(len(self.replicas)) + self.needs.reference.host_bytes


def uses_gpus(config: Config, host: Host) -> bool:
    """Whether workers on `host` compute on GPUs. Raises: ConfigError: `model.device` asks for a GPU, and
    there is none."""
    device = config.model.device
    if device.startswith("cuda") and not host.gpus:
        raise ConfigError(
            f"`model.device` ({device!r}) cannot be used here: nvidia-smi lists no GPU that this process may "
            "use\n  Set it to cpu, or to auto, which takes a GPU where there is one"
        )
    return device != "cpu" and bool(host.gpus)


def allowed_gpus(config: Config, host: Host) -> Host:
    """`host` with the one GPU that `model.device` (cuda:N) names, counted among the GPUs that this process
    may use; else with all GPUs. Raises: ConfigError: the host has fewer GPUs."""
    number, count = config.model.device.partition(":")[2], len(host.gpus)
    if not number or not count:
        return host
    if int(number) >= count:
        raise ConfigError(
            f"`model.device` ({config.model.device!r}) cannot be used here: this process may use {count} "
            f"GPUs: cuda:0 to cuda:{count - 1}\n  Name one of them, or set it to cuda: a run takes all"
        )
    return msgspec.structs.replace(host, gpus=(host.gpus[int(number)],))


def assign(config: Config, host: Host, needs: Needs, *, trains: bool = True, alone: bool = True) -> Placement:
    """Places for all workers of `config` on `host`, and for the trainer's ranks on this host. Not `trains`:
    only replicas and a relay. Not `alone`: the relay sends to relays of other hosts.

    Raises: ConfigError: the memory of the host or of a GPU is too small for the memory that the run keeps
    there.
    """
    on_gpu, replicas = uses_gpus(config, host), config.rollout.replicas
    computing = 0 if config.rollout.servers else replicas  # a server's GPUs are not the run's
    gpus: list[tuple[int, ...]] = [()] * (replicas + 1)
    if on_gpu and config.rollout.colocated:
        gpus = colocated_devices(replicas, config.rollout.tensor, config.trainer.ranks, len(host.gpus))
    elif on_gpu:
        ranks = config.trainer.ranks_of_host if trains else 0
        gpus[: computing + 1] = devices_of(computing, len(host.gpus), config.rollout.tensor, ranks=ranks)
    places = []
    for worker, used in enumerate(gpus):
        python = config.rollout.python if worker else config.trainer.python
        share_of = colocated_share if config.rollout.colocated else _share
        share = share_of(worker, gpus, host.gpus[used[0]], needs) if used else 1.0
        devices = tuple(host.gpus[gpu].index for gpu in used)
        ranks = 1 if worker else config.trainer.processes_of_host
        rule = replica_threads if worker else trainer_threads
        threads = None if on_gpu else rule(config, host, needs.num_parameters)
        places.append(Place(devices=devices, share=share, python=python, ranks=ranks, threads=threads))
    if places[0].threads is not None and config.trainer.ranks == 1:
        tokens = tokens_at_once(config, places[0].threads, needs.num_parameters)
        needs = replace(needs, activation_memory=needs.activation_memory.of_at_most(tokens))
    slots, versions = relay_slots(config, host, needs, head=trains and not alone)
    placement = Placement(
        host=host,
        needs=needs,
        device="cuda" if on_gpu else "cpu",
        trainer=places[0],
        relay=Place(devices=()),
        replicas=tuple(places[1:]),
        relay_slots=slots,
        relay_slots_max=config.relay_slots,
        relay_versions=versions,
        trains=trains,
        colocated=config.rollout.colocated,
    )
    if on_gpu:
        _check_gpus(config, placement)
    return placement


def devices_of(replicas: int, gpus: int, each: int = 1, *, ranks: int = 1) -> list[tuple[int, ...]]:
    """Positions of the trainer's GPUs, one for each of its `ranks`. Then the positions of each replica's
    GPUs, `each` for a replica.

    Raises: ConfigError: there are too few GPUs for the trainer, or for one replica.
    """
    if gpus == 1 and each == 1 and ranks == 1:
        return [(0,)] * (replicas + 1)
    free = gpus - ranks
    if ranks > 1 and free < min(replicas, 1):
        raise ConfigError(
            f"`trainer.shard` x `trainer.tensor` x `trainer.sequence` is {ranks}. Each rank needs a GPU, and "
            f"a replica one more: this host has {gpus}.\n  Lower them to at most {max(1, gpus - 1)} together"
        )
    sets = free // each
    if replicas and not sets:
        raise ConfigError(
            f"`rollout.tensor` ({each}) is the number of GPUs of one replica, and this host has {free} "
            f"beside the trainer's.\n  Lower it to at most {max(1, free)}"
        )
    first = (ranks + replica % sets * each for replica in range(replicas))
    return [tuple(range(ranks)), *(tuple(range(gpu, gpu + each)) for gpu in first)]


def _share(worker: int, gpus: Sequence[tuple[int, ...]], gpu: Gpu, needs: Needs) -> float:
    """The worker's share of the memory of each of its GPUs, 0 to 1. Worker 0 is the trainer."""
    together = [other for other, used in enumerate(gpus) if used == gpus[worker]]
    if 0 not in together:
        return 1 / len(together)
    each = _share_beside_trainer(gpu, needs, len(together) - 1)
    return each if worker else max(0.0, 1 - each * (len(together) - 1))


def _share_beside_trainer(gpu: Gpu, needs: Needs, replicas: int) -> float:
    """The least share of a replica. If the trainer leaves more, also the cache that its engine can use."""
    least, trainer = least_share(gpu, needs), needs.trainer.device_bytes + CONTEXT_BYTES
    used = (trainer + needs.activation_memory.trainer_bytes) / (TIGHT * gpu.memory_bytes) + replicas * least
    cache = min(needs.replica.cache_bytes / gpu.memory_bytes, (1 - used) / max(1, replicas))
    return least + max(0.0, cache)


def least_share(gpu: Gpu, needs: Needs) -> float:
    """The least share of the memory of `gpu` that a replica works with."""
    need = needs.replica.device_bytes
    working = max(need * WORKSPACE, need + needs.activation_memory.replica_bytes) + LIBRARIES_BYTES
    return min(1.0, (working + CONTEXT_BYTES) / gpu.memory_bytes)


def relay_slots(config: Config, host: Host, needs: Needs, *, head: bool) -> tuple[int, int]:
    """How many versions the relay holds whole, and how many in all: versions beyond the whole ones are
    deltas. Two large versions are whole, unless the relay sends (`head`) or stores whole versions. The head
    of several hosts needs a third: it receives one version's blocks from other hosts, while ranks here write
    the next.

    Raises: ConfigError: these versions do not fit.
    """
    completes = head and config.trainer.hosts > 1
    processes = needs.processes_bytes(config.rollout.replicas)
    if config.rollout.colocated:
        processes = needs.turn_bytes(config.rollout.replicas)
    version, least = needs.weights_bytes, VERSIONS_MIN + completes
    least_word = "three" if completes else "two"
    if processes + least * version > host.memory_bytes:
        raise ConfigError(
            f"the host has {size(host.memory_bytes)} of memory. The trainer keeps "
            f"{size(needs.trainer.host_bytes)} there, {config.rollout.replicas} replicas "
            f"{size(needs.replica.host_bytes)} each, and the relay {least_word} versions of {size(version)}: "
            f"{size(processes + least * version)}.\n  Lower {_smaller(config)}"
        )
    room, most = SHARED_FRACTION * max(0, host.free_bytes - processes), config.relay_slots
    if config.weights.slots is None and not head and not config.weights.directory and version > LARGE_BYTES:
        most = VERSIONS_MIN
    slots = max(least, min(most, int(room // max(1, version))))
    return slots, config.relay_versions if room >= (slots + 0.5) * version else slots


def _check_gpus(config: Config, placement: Placement) -> None:
    """Raises: ConfigError: a worker keeps more on its GPU than its share."""
    needs, gpus = placement.needs, {gpu.index: gpu for gpu in placement.host.gpus}
    for name, place, memory in placement.workers:
        used = [gpus[index] for index in place.devices or ()]
        gpu = min(used, key=lambda gpu: gpu.memory_bytes, default=None)
        if gpu is None or memory.device_bytes + CONTEXT_BYTES <= place.share * gpu.memory_bytes:
            continue
        room = place.share * gpu.memory_bytes - CONTEXT_BYTES
        alone = place is placement.trainer and place.share == 1
        advice = "Take a smaller model" if alone else f"Lower {_smaller(config)}"
        fit = 0 if place is placement.trainer else _slots_that_fit(config, needs, room)
        raise ConfigError(
            f"{name} keeps {size(memory.device_bytes)} on GPU {gpu.index} ({gpu.name}), and its share of "
            f"{size(gpu.memory_bytes)} there leaves it {size(max(0.0, room))}.\n  {advice}"
            f"{f': {fit} slots would fit' if fit > 0 else ''}"
        )


def _smaller(config: Config) -> str:
    rollout = config.rollout
    dtype = ', or set `model.dtype` to "bfloat16"' if config.model.dtype == "float32" else ""
    return (
        f"`rollout.replicas` ({rollout.replicas}), `rollout.slots` ({rollout.slots}) or "
        f"`rollout.max_sequence_tokens` ({rollout.max_sequence_tokens}){dtype}"
    )


def _slots_that_fit(config: Config, needs: Needs, room: float) -> int:
    """0 if the engine does not keep KV of every slot."""
    slot = needs.kv_token_bytes * config.rollout.max_sequence_tokens
    fit = int((room * config.rollout.tensor - 2 * needs.weights_bytes) // max(1, slot))
    return 0 if needs.replica.cache_bytes else fit


def size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


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
    """The worker's share of the memory of each of its GPUs in its turn. Worker 0 is the trainer. A process
    that sleeps keeps the context of CUDA."""
    replicas = [used for used in gpus[1:] if set(used) & set(gpus[worker])]
    same = 1 if worker == 0 else len(replicas)
    other = len(replicas) if worker == 0 else int(bool(set(gpus[0]) & set(gpus[worker])))
    return max(0.0, 1 - other * CONTEXT_BYTES / gpu.memory_bytes) / same
