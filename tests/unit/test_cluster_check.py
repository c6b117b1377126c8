"""What is told of the links between nodes."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import millrace
from millrace.config.schema import Config
from millrace.config.tables.operation import RayCluster
from millrace.core.errors import StorageError, WorkerError
from millrace.core.placement import HERE, Place
from millrace_ray import cluster_check, node_probe
from millrace_ray.cluster_check import LinkFacts, _measure, check_cluster
from millrace_ray.node_probe import look
from millrace_ray.places import Node
from millrace_ray.ray_hosts import node_problems

NODES = [Node(f"id-{name}", name, f"10.0.0.{number}", {}) for number, name in enumerate("abc")]


class End:
    """Its node sends at 1 GB/s, but to `deaf` ones nothing, and to `clogged` ones no more than a greeting."""

    def __init__(self, number: int, deaf: set[str], clogged: set[str]) -> None:
        self._number, self._deaf, self._clogged = number, deaf, clogged

    async def call(self, method: str, *args: object, timeout_s: float) -> int | tuple[float, float] | str:
        if method == "listen":
            return self._number
        address, port, num_bytes = args
        assert address == NODES[int(str(port))].address
        silent = address in self._deaf or (num_bytes and address in self._clogged)
        return "no answer" if silent else (0.001, 1e9)


def measured(
    monkeypatch: pytest.MonkeyPatch,
    deaf: set[str] = frozenset(),
    clogged: set[str] = frozenset(),
    broken: set[str] = frozenset(),
) -> tuple[list[LinkFacts], list[str]]:
    """`broken`: nodes on which no worker can be started."""

    class Played:
        def __init__(self, address: str, run_id: str) -> None:
            self.closed = False

        async def spawn(self, name: str, *args: object, place: Place = HERE, **how: object) -> Any:
            if place.host in broken:
                raise WorkerError(f"{name} did not start")
            return End([node.node_id for node in NODES].index(place.host), deaf, clogged)

        async def close(self) -> None:
            self.closed = True

    monkeypatch.setattr(cluster_check, "RayRuntime", Played)
    return asyncio.run(_measure("a:1", NODES))


def test_every_link_of_the_chain_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    links, problems = measured(monkeypatch)
    assert [(link.source, link.target) for link in links] == [("a", "b"), ("b", "c"), ("c", "a")]
    assert not problems


def test_nodes_that_cannot_connect_are_told_of_once_for_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    links, problems = measured(monkeypatch, deaf={"10.0.0.1"})
    assert [problem.split(":")[0] for problem in problems] == [
        f"node {name} cannot connect to b (10.0.0.1)" for name in "ac"
    ]
    assert len(links) == 2


def test_a_link_that_connects_and_carries_nothing_is_node_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    links, problems = measured(monkeypatch, clogged={"10.0.0.2"})
    assert len(links) == 2 and len(problems) == 1
    assert "node b connects to c (10.0.0.2), and 67.1 MB do not arrive within 15 s: no answer" in problems[0]


def test_every_node_whose_probe_does_not_start_is_told_of_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    links, problems = measured(monkeypatch, broken={"id-b"})
    assert [(link.source, link.target) for link in links] == [("a", "c"), ("c", "a")]
    assert [problem.split(":")[0] for problem in problems] == ["node b"]
    links, problems = measured(monkeypatch, broken={"id-a", "id-b"})
    assert not links and ["link-a did not start" in problems[0], "link-b did" in problems[1]] == [True] * 2


def test_a_node_with_another_python_is_node_problems() -> None:
    ours = look([], "/")
    assert not list(node_problems(NODES[0], ours))
    assert not list(node_problems(NODES[0], replace(ours, python=f"{ours.python}1")))  # a later bug fix of it
    [problem] = node_problems(NODES[0], replace(ours, python="3.9.1"))
    assert "Python there is 3.9.1, and the controller's is" in problem


def test_a_directory_that_cannot_be_written_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cluster_check, "connect", lambda address: None)
    monkeypatch.setattr(Path, "touch", full)
    config = Config.model_validate(
        {"model": {"path": "m"}, "task": {"kind": "gym", "name": "gcd"}, "reward": {"kind": "gym"}}
    )
    with pytest.raises(StorageError, match=r"(?s)No space.*--run-dir"):
        check_cluster(config, RayCluster(address="a:1"), tmp_path)


@pytest.mark.parametrize(
    "changed",
    [
        "millrace/engines/own/accelerated/native.c",
        "millrace/quickstart/new.toml",
        "millrace/core/types.py",
        "millrace_ui/page.css",
    ],
)
def test_a_node_with_another_file_of_the_package_has_another_millrace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    source = Path(millrace.__file__).parents[1]
    for package in ("millrace", "millrace_ui"):
        shutil.copytree(source / package, tmp_path / package)
    copy = tmp_path
    monkeypatch.setattr(millrace, "__file__", str(copy / "millrace" / "__init__.py"))
    before = node_probe.package()
    (copy / "millrace" / "core" / "__pycache__").mkdir(exist_ok=True)
    (copy / "millrace" / "core" / "__pycache__" / "x.pyc").touch()
    assert node_probe.package() == before
    with (copy / changed).open("a") as file:
        file.write(" ")
    assert node_probe.package() != before
