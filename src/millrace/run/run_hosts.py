"""From `[runtime]` to the hosts of a run, and to its runtime on a cluster. New kinds are added here.

`Joining` says where replicas go that join a running run, and the relays of their hosts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from math import inf
from typing import Protocol

from millrace.config.schema import Config
from millrace.config.tables.operation import RayCluster
from millrace.controller.supervisor import WorkerSpec
from millrace.core.errors import ConfigError, WorkerError
from millrace.core.placement import Host, Place
from millrace.core.protocols import Runtime
from millrace.core.wings import wing
from millrace.devices.inventory import read_memory
from millrace.placement.assign import Placement, allowed_gpus
from millrace.placement.hosts import NEW_LOOK_S, Layout, Present, added, joining_places, split
from millrace.run_directory.run_directory import RunDirectory
from millrace.runtime.blocking_calls import in_thread

LOOPBACK = "127.0.0.1"
ANSWER_S = NEW_LOOK_S + 5.0
"""For the list of nodes, and for the reports of new nodes. The command `millrace scale` waits longer."""


class ProcessRuntime(Runtime, Protocol):
    """A runtime of processes, here or on a cluster."""

    def dump_stacks(self) -> None: ...


def hosts(config: Config, this: Host) -> tuple[Host, ...]:
    """Where workers can run, the controller's own host first.

    Raises:
        ConfigError: `model.device` names no GPU of this host, or a node of the cluster cannot be used.
        WorkerError: the cluster cannot be reached.
    """
    if isinstance(config.runtime, RayCluster):
        found: tuple[Host, ...] = wing("ray.hosts")(config, config.runtime)
        return found
    return split(allowed_gpus(config, this), config.runtime.hosts, LOOPBACK)


def logical(config: Config) -> dict[str, tuple[str, ...]]:
    """Logical hosts of the local runtime, each with the prefix of its workers' commands."""
    if isinstance(config.runtime, RayCluster):
        return {}
    return {f"host-{number}": () for number in range(1, config.runtime.hosts)}


def on_cluster(config: Config, run: RunDirectory) -> ProcessRuntime:
    """The runtime on the cluster of `config.runtime`. Raises: WorkerError: it cannot be reached."""
    assert isinstance(config.runtime, RayCluster), config.runtime
    timeout_s, path = config.supervision.heartbeat_timeout_s, str(run.path.resolve())
    runtime: ProcessRuntime = wing("ray.runtime")(
        config.runtime.address,
        run_id=blake2b(path.encode(), digest_size=8).hexdigest(),
        log_dir=run.logs,
        silence_s_max=3 * timeout_s,
        answer_s=timeout_s,
    )
    return runtime


class Joining:
    """`join`, `relay` and `look` of a fleet. `layout` is that of the start. A host that was used once keeps
    its placement, so its memory is divided once. `apart`: places of the evaluator and the reference."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        *,
        replica: Callable[[str, Place], WorkerSpec],
        relay: Callable[[Placement], WorkerSpec],
        apart: Sequence[Place] = (),
    ) -> None:
        self._apart = apart
        self._config, self._layout, self._replica, self._relay = config, layout, replica, relay
        self._placements = {placed.relay.host: placed for placed in layout.placements}
        self._present = Present(layout.spare)

    async def look(self) -> None:
        """Read which nodes the cluster has now. Raises: WorkerError: the cluster cannot be reached."""
        if not isinstance(self._config.runtime, RayCluster):
            return
        try:
            async with asyncio.timeout(ANSWER_S):
                self._present = await in_thread(wing("ray.present"), self._config, self._config.runtime)
        except TimeoutError:
            raise WorkerError(
                f"the cluster has not listed its nodes within {ANSWER_S:g} s: is its head overloaded?"
            ) from None

    def join(self, names: Sequence[str], there: Sequence[WorkerSpec]) -> list[WorkerSpec]:
        """New replicas `names`, while the replicas `there` run. Raises: ConfigError: there is no room."""
        if self._config.rollout.servers:
            raise ConfigError("each of `rollout.servers` has its replica already: none can join")
        problems = list(self._present.problems)
        new = {placed.relay.host: placed for placed in self._new(problems)}
        here = {host: placed for host, placed in self._placements.items() if host not in self._present.lost}
        layout = replace(self._layout, placements=(*here.values(), *new.values()))
        free_bytes = inf if isinstance(self._config.runtime, RayCluster) else read_memory()[1]
        places = [*(spec.place for spec in there), *self._apart]
        try:
            joining = joining_places(self._config, layout, places, len(names), free_bytes=free_bytes)
        except ConfigError as error:
            raise ConfigError("; ".join([str(error), *problems])) from None
        self._placements |= {place.host: new[place.host] for place in joining if place.host in new}
        return list(map(self._replica, names, joining))

    def relay(self, host: str) -> WorkerSpec:
        return self._relay(self._placements[host])

    def _new(self, problems: list[str]) -> Iterator[Placement]:
        for host in self._present.spare:
            placed = None if host.name in self._placements else self._added(host, problems)
            if placed is not None:
                yield placed

    def _added(self, host: Host, problems: list[str]) -> Placement | None:
        try:
            return added(self._config, host, self._layout.main)
        except ConfigError as error:
            problems.append(f"{host.name}: {error}")
            return None
