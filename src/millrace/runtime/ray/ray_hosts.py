"""The hosts of a Ray cluster: what its nodes say of themselves, and whether a run can use them.

Every node sees the same files under the same paths: Python with Millrace, the model, the task, the reward and
the run directory. Nothing is copied to nodes.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from millrace.config.carried import is_carried
from millrace.config.schema import Config
from millrace.config.tables.runtime import RayCluster
from millrace.core.errors import ConfigError, boundary
from millrace.core.placement import OWN_ADDRESS, ROLES, Host
from millrace.runtime.ray.cluster import ClusterConnection, connect
from millrace.runtime.ray.node_probe import Seen, package
from millrace.runtime.ray.places import NONE, ROLE, Node

LOOK_S = 60.0
"""A node's first process takes seconds to start; a host with GPUs answers for them slowly."""
NEW_LOOK_S = 20.0
"""For nodes that appear while a run goes on: somebody waits for the answer."""


class Present(NamedTuple):
    """`spare` hosts that nobody uses, those that are `lost`, and why some nodes cannot be used."""

    spare: tuple[Host, ...] = ()
    lost: frozenset[str] = frozenset()
    problems: tuple[str, ...] = ()


def ray_hosts(config: Config, runtime: RayCluster) -> tuple[Host, ...]:
    """Nodes of the cluster that can carry workers, as hosts; the controller's own first.

    Raises: ConfigError: a node cannot be used, and why. WorkerError: the cluster cannot be reached.
    """
    cluster = connect(runtime.address)
    nodes, seen = survey(cluster, shared_paths(config), str(Path.cwd()))
    problems = [
        f"node {node.name}: {t}" for node, one in zip(nodes, seen, strict=True) for t in told_of(node, one)
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    found = [
        replace(one.host, name=node.name, address=OWN_ADDRESS, roles=node.roles)
        for node, one in zip(nodes, seen, strict=True)
        if isinstance(one, Seen)
    ]
    here = next(index for index, node in enumerate(nodes) if node.node_id == cluster.here)
    return (found[here], *found[:here], *found[here + 1 :])


def present(config: Config, runtime: RayCluster) -> Present:
    """What has become of the cluster since the run began. A node that cannot be used is told of, and left.

    Raises: WorkerError: the cluster cannot be reached.
    """
    cluster = connect(runtime.address)
    with boundary("controller", "looking at the nodes of the cluster"):
        alive = cluster.nodes()
        spare, paths = cluster.places.spare(alive), shared_paths(config)
        seen = look_at(cluster, list(spare.values()), paths, str(Path.cwd()), timeout_s=NEW_LOOK_S)
    found, problems = list[Host](), list[str]()
    for name, one in zip(spare, seen, strict=True):
        told = [f"node {spare[name].name}: {line}" for line in told_of(spare[name], one)]
        problems += told
        if isinstance(one, Seen) and not told:
            found.append(replace(one.host, name=name, address=OWN_ADDRESS, roles=spare[name].roles))
    return Present(tuple(found), cluster.places.lost(alive), tuple(problems))


def survey(
    cluster: ClusterConnection, paths: Sequence[str], directory: str
) -> tuple[list[Node], list[Seen | Exception]]:
    """Every live node, and what it says of itself and of the disk of `directory`."""
    nodes = cluster.nodes()
    return nodes, look_at(cluster, nodes, paths, directory, timeout_s=LOOK_S)


def look_at(
    cluster: ClusterConnection,
    nodes: Sequence[Node],
    paths: Sequence[str],
    directory: str,
    *,
    timeout_s: float,
) -> list[Seen | Exception]:
    """What each of `nodes` says."""
    look = "millrace.runtime.ray.node_probe:look"
    return cluster.ask(nodes, look, list(paths), directory, timeout_s=timeout_s) if nodes else []


def shared_paths(config: Config) -> list[str]:
    """Files that workers open by the names that the configuration has."""
    paths = [config.model.path]
    if config.task.kind == "file" and not is_carried(config.task.path):
        paths.append(config.task.path)
    if config.reward.kind == "function":
        paths += [file for file in (config.reward.path.rpartition(":")[0],) if file.endswith(".py")]
    return [str(Path(path).resolve()) for path in paths]


def told_of(node: Node, seen: Seen | Exception) -> Iterator[str]:
    """What keeps a node from being used."""
    if unknown := {*node.roles} - {*ROLES, NONE}:
        yield (
            f"its label {ROLE} has {', '.join(sorted(unknown))}: it is {NONE}, or some of {', '.join(ROLES)} "
            "with dots between them\n  Start it again with another label"
        )
    if isinstance(seen, Exception):
        told = [line for line in str(seen).splitlines() if line.strip()]
        yield (
            f"it cannot look at itself: {type(seen).__name__}: {told[-1].strip() if told else ''}\n"
            "  Ray there must run the Python of this controller, with Millrace, under the same path"
        )
        return
    if seen.problem:
        yield seen.problem
    if seen.missing:
        yield (
            f"there is no {', '.join(seen.missing)}\n"
            "  All nodes must see these paths: put them on storage that all nodes mount alike"
        )
    if _series(seen.python) != _series(here := platform.python_version()):
        yield (
            f"Python there is {seen.python}, and the controller's is {here}\n"
            "  Install the same series (as 3.12) on every node: what workers send each other depends on it"
        )
    if seen.package != (ours := package()):
        yield (
            f"Millrace there has other source files (digest {seen.package}) than the controller's ({ours})\n"
            "  Install the same version on every node"
        )


def _series(version: str) -> list[str]:
    return version.split(".")[:2]
