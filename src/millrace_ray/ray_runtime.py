"""The Ray runtime: every worker is an actor, on the node that its place names. Without the head of the
cluster no worker can start, and Ray ends this process after a minute, with an error of its own: so the
head is watched.

Ray starts processes, places processes on nodes, carries messages and reports deaths. The supervisor restarts
workers, our actor has the lease, and weights travel between relays.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from millrace.core.errors import ClusterError
from millrace.core.placement import HERE, OWN_ADDRESS, THIS_HOST, Place
from millrace.runtime.blocking_calls import in_thread
from millrace.runtime.local.launcher import ALLOCATOR
from millrace.runtime.process import check_kernel
from millrace.runtime.workers import GangHandle, Workers
from millrace_ray.actor import ActorSetup
from millrace_ray.cluster import LOCAL, ClusterConnection, connect
from millrace_ray.places import Node
from millrace_ray.remote_handle import RayHandle


class RayRuntime:
    """Actors of the cluster at `address` (HOST:PORT, or LOCAL: one that lives as long as this runtime).

    `run_id` names the run on the cluster. A controller that resumes a run kills the actors of the controller
    before. `log_dir` takes the output of each worker as NAME.EPOCH.log, bounded as `logs` says.
    `silence_s_max` and `answer_s` are as for `LocalRuntime`. All hosts see the same files under the same
    paths.

    The first spawn connects. Use it from the main thread. A process has one cluster at a time. When its head
    is gone, all workers count as dead, and `spawn` raises ClusterError.
    """

    def __init__(
        self,
        address: str = LOCAL,
        *,
        run_id: str = "",
        log_dir: Path | None = None,
        silence_s_max: float | None = None,
        answer_s: float | None = None,
    ) -> None:
        check_kernel()
        self._address, self._namespace = address, f"millrace-{run_id or os.getpid()}"
        self._log_dir, self._silence_s_max, self._answer_s = log_dir, silence_s_max, answer_s
        self._workers = Workers[RayHandle](log_dir)
        self._cluster: ClusterConnection | None = None
        self._watch: HeadWatch | None = None
        self._why_lost = ""

    async def spawn(
        self,
        name: str,
        target: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        place: Place = HERE,
        timeout_s: float = 60.0,
    ) -> RayHandle | GangHandle:
        """Start a worker; see `core.protocols.Runtime`. A worker that fails leaves no process behind."""
        self._workers.check(name, place.ranks)
        self._refuse_lost()
        cluster = self._connected()
        nodes = [await self._node(cluster, host) for host in place.hosts or (place.host,)]
        address = nodes[0].address
        each = (nodes[rank * len(nodes) // place.ranks] for rank in range(place.ranks))
        handle = self._workers.make(
            name,
            place.ranks,
            lambda one, epoch: RayHandle(one, epoch, cluster, self._namespace, next(each)),
        )
        worker_kwargs = {
            key: address if value == OWN_ADDRESS else value for key, value in (kwargs or {}).items()
        }
        meeting: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def begin(member: RayHandle, place: Place) -> None:
            await member.start(self._setup(place))
            variables = {}
            if "RANK" in place.environ:
                if place.environ["RANK"] == "0":
                    meeting.set_result(await member.rendezvous(place.meet))
                variables = {"MILLRACE_RENDEZVOUS": await meeting}
            await member.construct(target, worker_kwargs, variables, self._answer_s)

        place = replace(place, meet=address if place.hosts else "")
        await self._workers.start(handle, place, begin, target=target, timeout_s=timeout_s)
        return handle

    def dump_stacks(self) -> None:
        """Have every worker write its stacks into its log."""
        self._workers.dump_stacks()

    async def close(self) -> None:
        """Kill every worker and leave the cluster. Raises: DeadlineExceeded, naming those that live on."""
        self._workers.kill()
        try:
            await self._workers.gone()
        finally:
            if self._watch is not None:
                self._watch.close()
            if self._cluster is not None:
                self._cluster.close(lost=bool(self._why_lost))

    def _connected(self) -> ClusterConnection:
        """Blocks the loop at the first spawn, when no task waits for the loop yet. The main thread
        connects."""
        if self._cluster is None:
            self._cluster = connect(self._address)
            self._cluster.end_left_over(self._namespace)
            loop = asyncio.get_running_loop()
            self._lost = loop.create_future()

            def lost(why: str) -> None:
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._lose, why)

            self._watch = HeadWatch(self._cluster.head, self._cluster.nodes, lost)
        return self._cluster

    def _refuse_lost(self) -> None:
        if self._why_lost:
            raise ClusterError(f"{self._why_lost}\n  Start a cluster again, then `millrace train --resume`")

    def _lose(self, why: str) -> None:
        """The cluster is gone, and so is every worker."""
        self._why_lost = why
        self._lost.set_result(None)
        for handle in self._workers.each():
            handle.lost(why)

    async def _node(self, cluster: ClusterConnection, host: str) -> Node:
        nodes = in_thread(cluster.nodes)
        await asyncio.wait({nodes, self._lost}, return_when=asyncio.FIRST_COMPLETED)
        self._refuse_lost()
        alive = nodes.result()
        return cluster.places.node_of(cluster.here if host == THIS_HOST else host, alive)

    def _setup(self, place: Place) -> ActorSetup:
        defaults = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **ALLOCATOR}
        own = {name: os.environ.get(name, value) for name, value in defaults.items()}
        return ActorSetup(
            variables={**own, **place.variables},
            log_dir=str(self._log_dir.resolve()) if self._log_dir is not None else None,
            path=tuple(entry for entry in sys.path if entry),
            directory=os.getcwd(),
            silence_s_max=self._silence_s_max,
        )


# ---------------------------------------------------------------- the head


LOOK_S = 1.0
SILENT_S_MAX = 10.0
"""A head that accepts no connection for so long is gone."""
FROZEN_S_MAX = 20.0
"""A head that accepts connections, and answers nothing for so long, is gone too."""
STOPPED_S = 5.0
"""A longer time between two looks means that this process was stopped."""


class HeadWatch:
    """Calls `lost` with the reason, once, from a thread of its own. `ask` sends the head a request and
    waits."""

    def __init__(self, address: str, ask: Callable[[], object], lost: Callable[[str], None]) -> None:
        self._address, self._ask, self._lost = address, ask, lost
        self._closed = threading.Event()
        self._answered_s = time.monotonic()
        self._asking = threading.Thread(target=self._ask_on, name="ask the head", daemon=True)
        self._asking.start()
        threading.Thread(target=self._watch, name="watch the head", daemon=True).start()

    def close(self) -> None:
        """Stop the calls. Waits for a request under way, if the head answers. Idempotent."""
        self._closed.set()
        self._asking.join(LOOK_S)

    def _ask_on(self) -> None:
        while not self._closed.wait(LOOK_S):
            with suppress(Exception):  # no answer
                self._ask()
                self._answered_s = time.monotonic()

    def _watch(self) -> None:
        connected_s = looked_s = time.monotonic()
        while not self._closed.wait(LOOK_S):
            reason = self._refusal()
            now_s = time.monotonic()
            if now_s - looked_s > STOPPED_S:  # the head may have answered
                self._answered_s = connected_s = now_s
            looked_s = now_s
            if reason is None:
                connected_s = now_s
                reason = f"takes connections, but has answered nothing for {FROZEN_S_MAX:.0f} s"
            if now_s - connected_s > SILENT_S_MAX or now_s - self._answered_s > FROZEN_S_MAX:
                if not self._closed.is_set():
                    self._lost(f"the head of the Ray cluster, {self._address}, {reason}")
                return

    def _refusal(self) -> str | None:
        """Why the head accepts no connection. None: it accepts one."""
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), LOOK_S).close()
        except OSError as error:
            return f"takes no connection: {error}"
        return None
