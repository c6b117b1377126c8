"""Which node of a Ray cluster each host of a run is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from millrace.core.errors import HostLost, WorkerError
from millrace.core.placement import ROLES
from millrace_ray.places import ROLE, Node, Places


def node(name: str, *, node_id: str = "", gpus: float = 0.0, role: str = "") -> Node:
    labels = {ROLE: role} if role else {}
    return Node(node_id or f"id-{name}", name, f"10.0.0.{name[-1]}", {"GPU": gpus}, labels)


A, B, C = node("node-1"), node("node-2"), node("node-3")


@pytest.mark.parametrize("host", ["node-2", "id-node-2", "10.0.0.2"])
def test_a_host_is_a_node_by_name_id_or_address(host: str) -> None:
    assert Places().node_of(host, [A, B]) == B


def test_a_host_that_is_no_node_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        WorkerError, match="'elsewhere' is no live node of the cluster: there are node-1, node-2"
    ):
        Places().node_of("elsewhere", [A, B])


def placed(*nodes: Node) -> Places:
    places = Places()
    for one in nodes:
        places.node_of(one.name, nodes)
    return places


def test_a_lost_host_moves_to_a_node_that_carries_none_and_stays_there() -> None:
    places = placed(A, B)
    assert places.node_of("node-2", [A, C]) == C
    assert places.node_of("node-2", [A, B, C]) == C, "its workers are there now"


def test_a_lost_host_goes_to_its_own_node_where_that_has_begun_again() -> None:
    again = node("node-2", node_id="new")
    assert placed(A, B).node_of("node-2", [A, again, C]) == again


def test_without_a_free_node_a_lost_host_shares_the_one_with_the_fewest() -> None:
    places = placed(A, B, C)
    assert places.node_of("node-3", [A, B]) == A
    assert places.node_of("node-2", [A]) == A
    places = placed(A, B, C)
    places.node_of("node-3", [A, B])
    assert places.node_of("node-3", [A, B]) == A


def test_a_host_with_gpus_never_shares_and_takes_no_node_with_fewer() -> None:
    gpus = [node(f"gpu-{i}", gpus=count) for i, count in enumerate((8, 8, 4, 8))]
    places = placed(gpus[0], gpus[1])
    with pytest.raises(HostLost, match="Start a node with 8 GPUs"):
        places.node_of("gpu-1", [gpus[0], gpus[2]])
    assert places.node_of("gpu-1", [gpus[0], gpus[2], gpus[3]]) == gpus[3]


def test_nodes_that_are_no_host_are_spare() -> None:
    assert placed(A, B).spare([A, B, C]) == {"node-3": C}
    assert Places().spare([A]) == {"node-1": A}
    places = placed(A, B)
    places.node_of("node-2", [A, C])
    assert places.spare([A, C]) == {}, "it carries the host of a lost one"


def test_a_node_that_has_begun_again_is_the_host_that_it_was() -> None:
    again = node("node-2", node_id="new")
    assert placed(A, B).spare([A, again]) == {}
    places = placed(A, B)
    places.node_of("node-2", [A, C])
    assert places.spare([A, C, again]) == {"new": again}, "another node is that host by now"


def test_hosts_are_lost_whose_nodes_are_gone() -> None:
    assert placed(A, B).lost([A, B]) == set()
    assert placed(A, B).lost([A, C]) == {"node-2"}
    assert placed(A, B).lost([A, node("node-2", node_id="new")]) == set()


@pytest.mark.parametrize("look", [Places.lost, Places.spare])
def test_a_host_that_gets_its_node_meanwhile_disturbs_no_look(
    look: Callable[[Places, list[Node]], object],
) -> None:
    places = placed(A)

    class Watched(Node):
        @property
        def node_id(self) -> str:  # type: ignore[override]
            places.node_of("node-2", [B])
            return "id-watched"

    places.node_of("watched", [Watched("", "watched", "10.0.0.9", {})])
    places._nodes.pop("node-2", None)
    look(places, [A])


def test_the_label_of_a_node_says_what_may_run_there() -> None:
    assert A.roles == ROLES
    assert node("n", role="rollout.reward").roles == ("rollout", "reward")
    assert not {*node("n", role="none").roles} & {*ROLES}


def test_a_lost_host_goes_to_a_node_that_may_take_its_roles() -> None:
    first, second, third = (
        node(f"node-{i}", role=role) for i, role in enumerate(("trainer", "rollout", "rollout"))
    )
    places = placed(first, second)
    assert places.node_of("node-1", [first, third]) == third
    with pytest.raises(HostLost, match="Start a node with 0 GPUs for trainer"):
        places.node_of("node-0", [third])
    assert places.node_of("node-0", [third, C]) == C, "without a label: everything"
