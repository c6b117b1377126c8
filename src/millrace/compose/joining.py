"""Where replicas go that join a running run, and the relays of the hosts that come with them."""

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
from millrace.devices.inventory import read_memory
from millrace.placement.assign import Placement
from millrace.placement.hosts import Layout, added
from millrace.placement.joining import further
from millrace.runtime.ray.blocking_calls import aside
from millrace.runtime.ray.ray_hosts import NEW_LOOK_S, Present, present

ANSWER_S = NEW_LOOK_S + 5.0
"""For the list of nodes, and for the new ones to look at themselves. Who asks for replicas waits longer."""


class Joining:
    """`join`, `relay` and `look` of a fleet. `layout` is of the start. A host that was used once keeps its
    placement, so what it has is divided once. `aside`: where further replicas are that nobody counts."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        *,
        replica: Callable[[str, Place], WorkerSpec],
        relay: Callable[[Placement], WorkerSpec],
        aside: Sequence[Place] = (),
    ) -> None:
        self._aside = aside
        self._config, self._layout, self._replica, self._relay = config, layout, replica, relay
        self._placements = {placed.relay.host: placed for placed in layout.placements}
        self._present = Present(layout.spare)

    async def look(self) -> None:
        """Which nodes the cluster has by now. Raises: WorkerError: it cannot be reached."""
        if not isinstance(self._config.runtime, RayCluster):
            return
        try:
            async with asyncio.timeout(ANSWER_S):
                self._present = await aside(present, self._config, self._config.runtime)
        except TimeoutError:
            raise WorkerError(
                f"the cluster has not said for {ANSWER_S:g} s which nodes it has: is its head overloaded?"
            ) from None

    def join(self, names: Sequence[str], there: Sequence[WorkerSpec]) -> list[WorkerSpec]:
        """Replicas of these names beside those that are `there`. Raises: ConfigError: there is no room."""
        if self._config.rollout.servers:
            raise ConfigError("each of `rollout.servers` has its replica already: none can join")
        problems = list(self._present.problems)
        new = {placed.relay.host: placed for placed in self._new(problems)}
        here = {host: one for host, one in self._placements.items() if host not in self._present.lost}
        layout = replace(self._layout, placements=(*here.values(), *new.values()))
        free_bytes = inf if isinstance(self._config.runtime, RayCluster) else read_memory()[1]
        places = [*(spec.place for spec in there), *self._aside]
        try:
            found = further(self._config, layout, places, len(names), free_bytes=free_bytes)
        except ConfigError as error:
            raise ConfigError("; ".join([str(error), *problems])) from None
        self._placements |= {place.host: new[place.host] for place in found if place.host in new}
        return list(map(self._replica, names, found))

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
