"""Is this cluster ready for this run? Problems are reported before anything starts."""

from __future__ import annotations

import asyncio
import secrets
import statistics
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from millrace.checks.cluster_facts import CheckedCluster, LinkFacts, NodeFacts
from millrace.config.schema import Config
from millrace.config.tables.operation import RayCluster
from millrace.core import clock
from millrace.core.errors import MillraceError, writing
from millrace.core.placement import OWN_ADDRESS, Place
from millrace.core.protocols import Handle
from millrace.placement.assign import size
from millrace_ray.cluster import connect
from millrace_ray.link_probe import CONNECT_S, SEND_S
from millrace_ray.node_probe import NodeReport
from millrace_ray.places import Node
from millrace_ray.ray_hosts import node_problems, shared_paths, survey
from millrace_ray.ray_runtime import RayRuntime

T = TypeVar("T")
CLOCK_S_MAX = 1.0
"""Times of events and logs of several nodes are compared by people."""
SENT_BYTES = 64 << 20
SLOW = 0.5
"""A link slower than this share of the median is reported. The chain is as slow as its slowest link."""
GPU_FREE_MIN = 0.9
START_S = 60.0


def check_cluster(config: Config, runtime: RayCluster, run_path: Path) -> CheckedCluster:
    """Ask every node, and send over every link that will carry weights.

    Raises: WorkerError: the cluster cannot be reached. StorageError: the run could not write its files.
    """
    cluster, place = connect(runtime.address), _existing(run_path.resolve())
    token = place / f".millrace-check-{secrets.token_hex(4)}"
    with writing(token, "Name a directory that can be written, with --run-dir"):
        token.touch()
    try:
        began_s = clock.wall()
        nodes, reports = survey(cluster, [*shared_paths(config), str(token)], str(place))
        ended_s = clock.wall()
    finally:
        token.unlink()
    problems, warnings = list[str](), list[str]()
    facts, able = list[NodeFacts](), list[Node]()
    for node, report in zip(nodes, reports, strict=True):
        of_node = [f"node {node.name}: {problem}" for problem in node_problems(node, report)]
        problems += of_node
        if isinstance(report, NodeReport):
            ahead_s = max(0.0, report.wall_s - ended_s) + min(0.0, report.wall_s - began_s)
            facts.append(
                NodeFacts(
                    node.name,
                    report.host.cores,
                    report.host.free_bytes,
                    len(report.host.gpus),
                    report.disk_bytes,
                    ahead_s,
                )
            )
            warnings += [f"node {node.name}: {warning}" for warning in _warnings(report, ahead_s)]
            able += [] if of_node else [node]
    links, broken = asyncio.run(_measure(runtime.address, able)) if len(able) > 1 else ([], [])
    return CheckedCluster(facts, links, [*problems, *broken], [*warnings, *_slow(links)])


def _warnings(report: NodeReport, ahead_s: float) -> Iterator[str]:
    if abs(ahead_s) > CLOCK_S_MAX:
        yield f"its clock is {ahead_s:+.1f} s off the controller's: run a time service on all nodes"
    yield from report.faults
    for gpu in report.host.gpus:
        if gpu.free_bytes < GPU_FREE_MIN * gpu.memory_bytes:
            used = size(gpu.memory_bytes - gpu.free_bytes)
            yield f"{used} of GPU {gpu.index} ({gpu.name}) are in use by somebody"


async def _measure(address: str, nodes: Sequence[Node]) -> tuple[list[LinkFacts], list[str]]:
    """Each node connects to every other node. Then all nodes send to the next node at once, as relays do. A
    node whose probe does not start is a problem, and the other nodes are measured without it."""
    runtime = RayRuntime(address, run_id=secrets.token_hex(4))
    try:
        begun = await _gather(_end(runtime, node) for node in nodes)
        problems = [
            f"node {node.name}: nothing that listens could be started there: {end}"
            for node, end in zip(nodes, begun, strict=True)
            if isinstance(end, str)
        ]
        able = [(node, *end) for node, end in zip(nodes, begun, strict=True) if not isinstance(end, str)]

        async def send(source: int, target: int, num_bytes: int) -> tuple[float, float] | str:
            node, _, port = able[target]
            there = (node.address, port, num_bytes)
            with suppress(MillraceError):
                answer: tuple[float, float] | str = await able[source][1].call(
                    "send", *there, timeout_s=2 * SEND_S
                )
                return answer
            return "no answer"

        numbers = range(len(able))
        pairs = [(a, b) for a in numbers for b in numbers if a != b]
        connected = await _gather(send(a, b, 0) for a, b in pairs)
        chain = [(a, (a + 1) % len(able)) for a in numbers if len(able) > 1]
        sent = await _gather(send(a, b, SENT_BYTES) for a, b in chain)
    finally:
        await runtime.close()
    cut = {pair: answer for pair, answer in zip(pairs, connected, strict=True) if isinstance(answer, str)}
    problems += [_unreachable(able[a][0], able[b][0], reason) for (a, b), reason in cut.items()]
    links = list[LinkFacts]()
    for (a, b), answer in zip(chain, sent, strict=True):
        source, target = able[a][0], able[b][0]
        if not isinstance(answer, str):
            links.append(LinkFacts(source.name, target.name, *answer))
        elif (a, b) not in cut:
            problems.append(_clogged(source, target, answer))
    return links, problems


async def _gather(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all `calls` at once. A call returns its failure, so a failure does not cancel the other calls."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call) for call in calls]
    return [task.result() for task in tasks]


async def _end(runtime: RayRuntime, node: Node) -> tuple[Handle, int] | str:
    """The worker on `node` and its port, or the reason why there is none."""
    try:
        end = await runtime.spawn(
            f"link-{node.name}",
            "millrace_ray.link_probe:LinkProbe",
            {"address": OWN_ADDRESS},
            place=Place(host=node.node_id),
            timeout_s=START_S,
        )
        return end, int(await end.call("listen", timeout_s=CONNECT_S))
    except MillraceError as error:
        return str(error)


def _unreachable(source: Node, target: Node, reason: str) -> str:
    return (
        f"node {source.name} cannot connect to {target.name} ({target.address}): {reason}\n"
        "  Relays talk over TCP, on ports that the system chooses: let the nodes of a run reach each other"
    )


def _clogged(source: Node, target: Node, reason: str) -> str:
    return (
        f"node {source.name} connects to {target.name} ({target.address}), and {size(SENT_BYTES)} do not "
        f"arrive within {SEND_S:g} s: {reason}\n  Relays send weights over this link: look at its speed, and "
        "at the largest packets that it passes (MTU)"
    )


def _slow(links: Sequence[LinkFacts]) -> Iterator[str]:
    if links:
        median = statistics.median(link.bytes_per_s for link in links)
        for link in links:
            if link.bytes_per_s < SLOW * median:
                rate, usual = size(link.bytes_per_s), size(median)
                yield f"the link {link.source} -> {link.target} carries {rate}/s, half of the links {usual}/s"


def _existing(path: Path) -> Path:
    """`path`, or the nearest directory above it that exists."""
    return next(directory for directory in (path, *path.parents) if directory.is_dir())
