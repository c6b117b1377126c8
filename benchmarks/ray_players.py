"""Played workers on Ray: the controller's side is real (`RayHandle`, its streams), so is the worker's
(`Hosted`). Only the actors are replaced: each process of a troupe is one actor, and plays many workers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from players import seat

from millrace.core.placement import HERE, Place
from millrace_ray.actor import ActorSetup, Hosted
from millrace_ray.cluster import LOCAL, connect
from millrace_ray.remote_handle import RayHandle

CALLS_MAX = 10_000


class RayTroupe:
    """A `Runtime`: worker `name` is played by actor `seat(name)` of `size`, on a cluster of this machine."""

    def __init__(self, size: int, *, silence_s_max: float) -> None:
        path = (str(Path(__file__).parent), *filter(None, sys.path))
        os.environ["PYTHONPATH"] = os.pathsep.join(path)  # of the cluster that starts now
        self._cluster = connect(LOCAL)
        self._setup = ActorSetup({}, None, path, os.getcwd(), silence_s_max)
        import ray

        stage = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=CALLS_MAX)(_Stage)
        self._view = _View(self._cluster, [stage.remote() for _ in range(size)])
        [self._node, *_] = self._cluster.nodes()

    async def spawn(
        self,
        name: str,
        target: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        place: Place = HERE,
        timeout_s: float = 60.0,
    ) -> RayHandle:
        handle = RayHandle(name, 1, self._view, "played", self._node)  # type: ignore[arg-type]
        await handle.start(self._setup)
        await handle.construct(target, kwargs or {}, {}, None)
        return handle

    async def close(self) -> None:
        self._cluster.close()


class _View:
    """In the cluster's place for `RayHandle`: what it calls an actor is a part of one."""

    here = ""

    def __init__(self, cluster: Any, stages: list[Any]) -> None:
        self.actor_errors, self.unavailable = cluster.actor_errors, cluster.unavailable
        self._stages = stages

    def make_actor(self, namespace: str, name: str, epoch: int, node: Any) -> _Part:
        return _Part(self._stages[seat(name) % len(self._stages)], name, epoch)

    def kill(self, actor: Any) -> None:
        """They end together."""

    def signal(self, node: str, pid: int, number: int) -> None:
        """They end together."""


class _Part:
    def __init__(self, stage: Any, name: str, epoch: int) -> None:
        self._stage, self._whose = stage, (name, epoch)

    def __getattr__(self, command: str) -> _Command:
        return _Command(self._stage, (*self._whose, command))


class _Command:
    def __init__(self, stage: Any, command: tuple[str, int, str]) -> None:
        self._stage, self._command = stage, command

    def remote(self, *args: Any) -> Any:
        return self._stage.do.remote(*self._command, *args)


class _Stage:
    """The actor."""

    def __init__(self) -> None:
        self._parts: dict[str, Hosted] = {}

    async def do(self, name: str, epoch: int, command: str, *args: Any) -> Any:
        if name not in self._parts:
            self._parts[name] = Hosted(name, epoch)
        return await getattr(self._parts[name], command)(*args)
