"""Which node of the cluster each host of a run is. Pure.

A host is a name that the run gives its workers. When the host's node is lost, another node takes its place,
and all workers of the host start there. A node without a host comes first, then the node with the fewest
hosts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from millrace.core.errors import HostLost, WorkerError
from millrace.core.placement import ROLES

ROLE = "millrace-role"
"""The label of a node that says what may run there: some of `ROLES` with dots between them, or `none`."""
NONE = "none"


class Node(NamedTuple):
    """A live node of a cluster. `resources` and `labels` are Ray's, custom ones too."""

    node_id: str
    name: str
    address: str
    resources: Mapping[str, float]
    labels: Mapping[str, str] = {}

    @property
    def gpus(self) -> float:
        return self.resources.get("GPU", 0.0)

    @property
    def roles(self) -> tuple[str, ...]:
        """What may run there: everything, unless a label says otherwise."""
        label = self.labels.get(ROLE, "")
        return tuple(label.split(".")) if label else ROLES

    def is_called(self, host: str) -> bool:
        return host in (self.name, self.node_id, self.address)


class Places:
    """Remembers the node of each host, so that a host stays on its node. A thread may read while another
    thread writes."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}

    def node_of(self, host: str, alive: Sequence[Node]) -> Node:
        """The node that is `host` now.

        Raises: WorkerError: no such node lives. HostLost: the node is lost, and no node can take its place.
        """
        named = [node for node in alive if node.is_called(host)]
        before = self._nodes.get(host)
        if before is not None:
            named = [node for node in alive if node.node_id == before.node_id] or named
        node = named[0] if named else self._other(host, before, alive)
        self._nodes[host] = node
        return node

    def lost(self, alive: Sequence[Node]) -> frozenset[str]:
        """Hosts whose nodes are gone, and have not begun again."""
        ids = {node.node_id for node in alive}
        return frozenset(
            host
            for host, node in list(self._nodes.items())
            if node.node_id not in ids and not any(one.is_called(host) for one in alive)
        )

    def spare(self, alive: Sequence[Node]) -> dict[str, Node]:
        """Nodes that are no host, each by the name that a host there can have. A node that has begun again is
        its former host, unless another node is this host by now."""
        ids = {node.node_id for node in alive}
        carried = {node.node_id for node in list(self._nodes.values())}
        waiting = [host for host, node in list(self._nodes.items()) if node.node_id not in ids]
        return {
            node.node_id if node.name in self._nodes else node.name: node
            for node in alive
            if node.node_id not in carried and not any(node.is_called(host) for host in waiting)
        }

    def _other(self, host: str, before: Node | None, alive: Sequence[Node]) -> Node:
        there = ", ".join(node.name for node in alive)
        if before is None:
            raise WorkerError(f"{host!r} is no live node of the cluster: there are {there}")
        carried = [node.node_id for name, node in list(self._nodes.items()) if name != host]
        fit = [node for node in alive if node.gpus >= before.gpus and {*node.roles} >= {*before.roles}]
        if before.gpus:  # hosts of a node already use its GPUs by number
            fit = [node for node in fit if node.node_id not in carried]
        if not fit:
            lost = f"the node of host {host!r} ({before.address}) is lost"
            raise HostLost(
                f"{lost}, and none of {there} can take its place.\n  Start a node with {before.gpus:g} GPUs "
                f"for {' and '.join(before.roles)}"
            )
        return min(fit, key=lambda node: carried.count(node.node_id))
