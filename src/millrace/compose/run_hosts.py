"""From `[runtime]` to the hosts of a run, and to its runtime on a cluster. New kinds are added here."""

from __future__ import annotations

from hashlib import blake2b
from typing import Protocol

from millrace.config.schema import Config
from millrace.config.tables.runtime import RayCluster
from millrace.core.placement import Host
from millrace.core.protocols import Runtime
from millrace.core.wings import wing
from millrace.placement.assign import allowed_gpus
from millrace.placement.hosts import split
from millrace.run_directory.run_directory import RunDirectory

LOOPBACK = "127.0.0.1"


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
