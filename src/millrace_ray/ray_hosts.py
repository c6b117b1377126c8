"""The hosts of a Ray cluster: what its nodes report, and whether a run can use its nodes.

Every node sees the same files under the same paths: Python with Millrace, the model, the task, the reward and
the run directory. Nothing is copied to nodes.
"""

from __future__ import annotations

import glob
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from millrace.config.carried import is_carried
from millrace.config.schema import Config
from millrace.config.tables.operation import RayCluster
from millrace.config.tables.task import members_of
from millrace.core.errors import ConfigError, boundary
from millrace.core.placement import OWN_ADDRESS, ROLES, Host
from millrace.placement.hosts import NEW_LOOK_S, Present
from millrace_ray.cluster import ClusterConnection, connect
from millrace_ray.node_probe import NodeReport, package
from millrace_ray.places import NONE, ROLE, Node

LOOK_S = 60.0
"""A node's first process takes seconds to start, and GPUs answer slowly."""


def ray_hosts(config: Config, runtime: RayCluster) -> tuple[Host, ...]:
    """Nodes of the cluster that can carry workers, as hosts; the controller's node first.

    Raises: ConfigError: a node cannot be used, and why. WorkerError: the cluster cannot be reached.
    """
    cluster = connect(runtime.address)
    nodes, reports = survey(cluster, shared_paths(config), str(Path.cwd()))
    problems = [
        f"node {node.name}: {problem}"
        for node, report in zip(nodes, reports, strict=True)
        for problem in node_problems(node, report)
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    hosts = [
        replace(report.host, name=node.name, address=OWN_ADDRESS, roles=node.roles)
        for node, report in zip(nodes, reports, strict=True)
        if isinstance(report, NodeReport)
    ]
    here = next(index for index, node in enumerate(nodes) if node.node_id == cluster.here)
    return (hosts[here], *hosts[:here], *hosts[here + 1 :])


def present(config: Config, runtime: RayCluster) -> Present:
    """How the cluster has changed since the run began. `problems` reports a node that cannot be used.

    Raises: WorkerError: the cluster cannot be reached.
    """
    cluster = connect(runtime.address)
    with boundary("controller", "looking at the nodes of the cluster"):
        alive = cluster.nodes()
        spare, paths = cluster.places.spare(alive), shared_paths(config)
        reports = look_at(cluster, list(spare.values()), paths, str(Path.cwd()), timeout_s=NEW_LOOK_S)
    hosts, problems = list[Host](), list[str]()
    for (name, node), report in zip(spare.items(), reports, strict=True):
        of_node = [f"node {node.name}: {problem}" for problem in node_problems(node, report)]
        problems += of_node
        if isinstance(report, NodeReport) and not of_node:
            hosts.append(replace(report.host, name=name, address=OWN_ADDRESS, roles=node.roles))
    return Present(tuple(hosts), cluster.places.lost(alive), tuple(problems))


def survey(
    cluster: ClusterConnection, paths: Sequence[str], directory: str
) -> tuple[list[Node], list[NodeReport | Exception]]:
    """Every live node, and its report of itself and of the disk of `directory`."""
    nodes = cluster.nodes()
    return nodes, look_at(cluster, nodes, paths, directory, timeout_s=LOOK_S)


def look_at(
    cluster: ClusterConnection,
    nodes: Sequence[Node],
    paths: Sequence[str],
    directory: str,
    *,
    timeout_s: float,
) -> list[NodeReport | Exception]:
    """The report of each of `nodes`."""
    look = "millrace_ray.node_probe:look"
    return cluster.ask(nodes, look, list(paths), directory, timeout_s=timeout_s) if nodes else []


def shared_paths(config: Config) -> list[str]:
    """Files that workers open by their names in the configuration."""
    paths = [config.model.path]
    parts = config.by_part.values()
    files = (part.task for part in parts if part.task.kind == "file")
    paths += [_without_pattern(task.path) for task in files if not is_carried(task.path)]
    rewards = (reward for part in parts for reward in members_of(part.reward).values())
    functions = (reward for reward in rewards if reward.kind == "function")
    paths += [file for one in functions if (file := one.path.rpartition(":")[0]).endswith(".py")]
    return [str(Path(path).resolve()) for path in paths]


def _without_pattern(path: str) -> str:
    """Of a pattern of files the directory above."""
    return next(
        str(up) for up in [Path(path), *Path(path).parents] if not glob.has_magic(str(up)) or up.exists()
    )


def node_problems(node: Node, report: NodeReport | Exception) -> Iterator[str]:
    """Why a run cannot use a node."""
    if unknown := {*node.roles} - {*ROLES, NONE}:
        yield (
            f"its label {ROLE} has {', '.join(sorted(unknown))}: it is {NONE}, or some of {', '.join(ROLES)} "
            "with dots between them\n  Start it again with another label"
        )
    if isinstance(report, Exception):
        lines = [line for line in str(report).splitlines() if line.strip()]
        yield (
            f"it cannot look at itself: {type(report).__name__}: {lines[-1].strip() if lines else ''}\n"
            "  Ray there must run the Python of this controller, with Millrace, under the same path"
        )
        return
    if report.problem:
        yield report.problem
    if report.missing:
        yield (
            f"there is no {', '.join(report.missing)}\n"
            "  All nodes must see these paths: put them on storage that all nodes mount alike"
        )
    if _series(report.python) != _series(here := platform.python_version()):
        yield (
            f"Python there is {report.python}, and the controller's is {here}\n"
            "  Install the same series (as 3.12) on every node: the messages of workers depend on the series"
        )
    if report.package != (ours := package()):
        yield (
            f"Millrace there has other source files (digest {report.package}) than here ({ours})\n"
            "  Install the same version on every node"
        )


def _series(version: str) -> list[str]:
    return version.split(".")[:2]
