"""What a check of a cluster has found: its nodes, its links, problems and warnings."""

from __future__ import annotations

import msgspec


class NodeFacts(msgspec.Struct, frozen=True):
    """`free_bytes`: of memory; `disk_bytes`: free where the run is; `clock_s`: ahead of the controller's."""

    name: str
    cores: int
    free_bytes: int
    gpus: int
    disk_bytes: int
    clock_s: float


class LinkFacts(msgspec.Struct, frozen=True):
    """From one node to the next one of the chain."""

    source: str
    target: str
    connect_s: float
    bytes_per_s: float


class CheckedCluster(msgspec.Struct, frozen=True):
    """`problems` keep a run from starting, `warnings` do not."""

    nodes: list[NodeFacts]
    links: list[LinkFacts]
    problems: list[str]
    warnings: list[str]
