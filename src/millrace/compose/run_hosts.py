"""From `[runtime]` to the hosts of a run. A new kind of runtime is added here."""

from __future__ import annotations

from millrace.config.schema import Config
from millrace.config.tables.runtime import RayCluster
from millrace.core.placement import Host
from millrace.core.wings import wing
from millrace.placement.assign import allowed_gpus
from millrace.placement.hosts import split

LOOPBACK = "127.0.0.1"


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
