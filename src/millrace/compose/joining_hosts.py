"""Where replicas go that join a running run, and the relays of their hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf

from millrace.config.schema import Config
from millrace.config.tables.runtime import RayCluster
from millrace.controller.supervisor import WorkerSpec
from millrace.core.errors import ConfigError, WorkerError
from millrace.core.placement import Host, Place
from millrace.core.wings import wing
from millrace.devices.inventory import read_memory
from millrace.placement.assign import Placement
from millrace.placement.hosts import Layout, added
from millrace.placement.joining import NEW_LOOK_S, Present, joining_places
from millrace.runtime.blocking_calls import in_thread

ANSWER_S = NEW_LOOK_S + 5.0
"""For the list of nodes, and for the reports of new nodes. The command `millrace scale` waits longer."""


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
