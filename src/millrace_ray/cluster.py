"""The Ray cluster that a run uses: a cluster that exists, or a cluster started here. Only this module imports
Ray.

Ray's restarts, retries, usage reports, log forwarding and choice of devices are off. A bare `ray.init()`
joins the cluster that this machine used last, so the address is always passed.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from millrace.core.errors import WorkerError
from millrace.runtime.process import ONE_HASH_SEED
from millrace.runtime.seam import load_class
from millrace_ray.actor import Hosted
from millrace_ray.places import Node, Places

LOCAL = "local"
"""As an address: start a cluster of this machine only, for as long as it is used."""

HEAD = "node:__internal_head__"
"""A resource of the head's node."""

LEASE = "lease"
"""The concurrency group of an actor's second loop."""

ASK_S = 10.0
OBJECT_STORE_BYTES = 256 << 20
"""Of a cluster that is started here. Batches go through it; weights do not."""

HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""With these values a host that does not answer counts as dead after about 4 s; by Ray's defaults, after a
minute."""

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_process_group_cleanup_enabled": "1",  # processes that a worker started end with the worker
    "RAY_memory_monitor_refresh_ms": "0",  # the supervisor decides who is killed
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "MALLOC_ARENA_MAX": "1",
    **{f"RAY_{name}": str(value) for name, value in HEALTH.items()},
}
"""Of every process of a cluster. A user who runs `ray start` sets these variables there; see
docs/cluster.md."""


QUIET = {"RAY_DEDUP_LOGS_SKIP_REGEX": "."}
"""Ray would print the reports of its raylets on our stdout. The supervisor reports deaths."""

LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""With this value Ray's processes of one machine listen at 127.0.0.1, as on systems that can have no cluster.
Otherwise they listen on every interface. Ray reads the variable when Ray is imported."""

_connected: dict[str, ClusterConnection] = {}
"""The connection of this process, by address. A process can have one."""


def connect(address: str) -> ClusterConnection:
    """The connection to the cluster at `address` (HOST:PORT, or LOCAL). The main thread makes a connection,
    where there is none yet.

    Raises: WorkerError: the cluster cannot be reached, or this process uses another cluster.
    """
    if address not in _connected:
        _connected[address] = ClusterConnection(address)
    return _connected[address]


class ClusterConnection:
    """One connection of this process to a cluster. Its methods wait for the cluster. `places` says which node
    is which host of the run."""

    def __init__(self, address: str) -> None:
        self._ray = ray = _import_ray(LOOPBACK_ONLY if address == LOCAL else {})
        if ray.is_initialized():
            raise WorkerError(
                "this process is connected to a Ray cluster already, and it can use one only.\n"
                "  Call `ray.shutdown()` before the run begins"
            )
        self._address = address
        settings: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if address == LOCAL:
            settings |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES, "num_gpus": 0}
        with _environment(ENVIRONMENT | LOOPBACK_ONLY if address == LOCAL else {}), _signals():
            try:
                _refuse_unreachable(address)
                ray.init(address=address, **settings)
            except (RuntimeError, ValueError, OSError) as error:
                raise WorkerError(
                    f"cannot use the Ray cluster at {address!r}: {error}\n"
                    "  `runtime.address` is HOST:PORT of its head, as `ray start --head` printed it.\n"
                    "  A cluster with a token needs RAY_AUTH_MODE=token and RAY_AUTH_TOKEN here too"
                ) from error
        self.places = Places()
        self.here: str = ray.get_runtime_context().get_node_id()
        self.head: str = ray.get_runtime_context().gcs_address if address == LOCAL else address
        self.actor_errors: tuple[type[BaseException], ...] = (
            ray.exceptions.RayActorError,
            ray.exceptions.ActorUnschedulableError,
            ray.exceptions.NodeDiedError,
        )
        self.unavailable = ray.exceptions.ActorUnavailableError
        self._actors = ray.remote(
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=1000,
            concurrency_groups={LEASE: 100},
            runtime_env={"env_vars": ONE_HASH_SEED},  # which Python reads before it runs any line of ours
        )(_with_lease(ray))

    def nodes(self) -> list[Node]:
        """The live nodes, the head's node first."""
        nodes = [
            Node(
                node["NodeID"],
                node["NodeName"],
                node["NodeManagerAddress"],
                node["Resources"],
                node.get("Labels", {}),
            )
            for node in self._ray.nodes()
            if node["Alive"]
        ]
        return sorted(nodes, key=lambda node: (HEAD not in node.resources, node.name, node.node_id))

    def ask(self, nodes: Sequence[Node], target: str, *args: Any, timeout_s: float) -> list[Any]:
        """Call "package.module:function" on all `nodes` at once. Returns each node's result, or its error."""
        run = self._ray.remote(num_cpus=0, max_retries=0)(_run)
        refs = [
            run.options(scheduling_strategy=self._on(node.node_id)).remote(target, args) for node in nodes
        ]
        done, _ = self._ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
        return [_outcome(self._ray, ref) if ref in done else TimeoutError("no answer") for ref in refs]

    def make_actor(self, namespace: str, name: str, epoch: int, node: str) -> Any:
        """An actor on `node`. If it cannot be there, its first call fails."""
        # An actor's name stays taken for a while after its death, so the name has the epoch.
        return self._actors.options(
            namespace=namespace, name=f"{name}#{epoch}", scheduling_strategy=self._on(node)
        ).remote(name, epoch)

    def kill(self, actor: Any) -> None:
        with suppress(Exception):  # the actor or the cluster is gone
            self._ray.kill(actor, no_restart=True)

    def signal(self, node: str, pid: int, number: signal.Signals) -> None:
        """Send a signal to a process of `node`, if the node can be reached."""
        send = self._ray.remote(num_cpus=0, max_retries=0)(_send_signal)
        with suppress(Exception):
            self._ray.get(
                send.options(scheduling_strategy=self._on(node)).remote(pid, int(number)), timeout=ASK_S
            )

    def close(self, *, lost: bool = False) -> None:
        """Leave the cluster; a cluster that was started here ends. Idempotent. `lost`: the head is gone."""
        _connected.pop(self._address, None)
        if lost:
            atexit.unregister(self._ray.shutdown)  # the shutdown would wait for the head
        elif self._ray.is_initialized():
            with _signals():
                self._ray.shutdown()

    def end_left_over(self, namespace: str) -> None:
        """Kill the actors that an earlier controller left in `namespace`."""
        for actor in self._ray.util.list_named_actors(all_namespaces=True):
            if actor["namespace"] == namespace:
                with suppress(ValueError):  # the actor has ended meanwhile
                    self.kill(self._ray.get_actor(actor["name"], namespace=namespace))

    def _on(self, node: str) -> Any:
        return self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)


def _refuse_unreachable(address: str) -> None:
    """Raises: OSError, ValueError. Ray itself would try for minutes."""
    if address != LOCAL:
        host, _, port = address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), ASK_S).close()


def _run(target: str, args: tuple[Any, ...]) -> Any:
    return load_class(target)(*args)


def _outcome(ray: Any, ref: Any) -> Any:
    try:
        return ray.get(ref)
    except Exception as error:
        return error


def _send_signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _with_lease(ray: Any) -> type:
    """`Hosted`, with the methods of its second loop marked for Ray."""
    second = ("lease", "look_at_log", "ping")
    marked = {name: ray.method(concurrency_group=LEASE)(getattr(Hosted, name)) for name in second}
    return type("Hosted", (Hosted,), marked)


def _import_ray(variables: Mapping[str, str]) -> Any:
    try:
        with _environment({**QUIET, **variables}):
            import ray.exceptions
            import ray.util
            import ray.util.scheduling_strategies

            import ray
    except ImportError as error:
        raise WorkerError(
            '`runtime.kind` "ray" needs Ray: install `millrace[ray]`, the same version on every host'
        ) from error
    return ray


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """For processes that start in the block: set those of `variables` that the environment does not have."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def _signals() -> Iterator[None]:
    """Ray installs its own handler for SIGTERM; this restores the handlers of the run."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
