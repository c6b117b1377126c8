"""What `millrace check` says of a cluster before a run starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.namespaces import refusal
from tests.ray.nodes import nodes

from millrace.cli.app import run as millrace
from millrace.runtime import ray_cluster


def test_a_cluster_of_one_node_is_ready_and_a_path_that_is_not_there_is_named(
    start: Path, address: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = ["check", str(start), "--set", "runtime.kind=ray", "--set", f"runtime.address={address}"]
    try:
        assert millrace([*asked, "--run-dir", str(tmp_path), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        [node] = told["nodes"]
        assert abs(node["clock_s"]) < 1 and not told["problems"]
        lost = ["--set", f"model.path={tmp_path / 'no-model'}"]
        assert millrace([*asked, *lost, "--run-dir", str(tmp_path), "--json"]) == 2
        [problem] = json.loads(capsys.readouterr().out)["problems"]
        assert f"node {node['name']}: there is no" in problem and "no-model" in problem
    finally:
        for cluster in list(ray_cluster._connected.values()):
            cluster.close()


def test_the_links_of_a_cluster_are_measured(start: Path, tmp_path: Path) -> None:
    if why := refusal():
        pytest.skip(why)
    with nodes(2) as cluster:
        asked = [
            "check",
            str(start),
            "--set",
            "runtime.kind=ray",
            "--set",
            f"runtime.address={cluster.address}",
        ]
        command = [*cluster.hosts[0].prefix, sys.executable, "-m", "millrace", *asked, "--json"]
        done = subprocess.run(
            [*command, "--run-dir", str(tmp_path)], capture_output=True, text=True, check=True
        )
    told = json.loads(done.stdout)
    assert [(link["source"], link["target"]) for link in told["links"]] == [
        ("10.77.0.1", "10.77.0.2"),
        ("10.77.0.2", "10.77.0.1"),
    ]
    assert all(0.5e8 < link["bytes_per_s"] < 1.5e8 for link in told["links"]), "a gigabit a second"
