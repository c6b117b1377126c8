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
from millrace_ray import cluster


@pytest.mark.smoke
def test_a_cluster_of_one_node_is_ready_and_a_path_that_is_not_there_is_named(
    start: Path, address: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = ["check", str(start), "--set", "runtime.kind=ray", "--set", f"runtime.address={address}"]
    try:
        assert millrace([*asked, "--run-dir", str(tmp_path), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        [node] = report["nodes"]
        assert abs(node["clock_s"]) < 1 and not report["problems"]
        lost = ["--set", f"model.path={tmp_path / 'no-model'}"]
        assert millrace([*asked, *lost, "--run-dir", str(tmp_path), "--json"]) == 2
        [problem] = json.loads(capsys.readouterr().out)["problems"]
        assert f"node {node['name']}: there is no" in problem and "no-model" in problem
    finally:
        for connected in list(cluster._connected.values()):
            connected.close()


def test_the_links_of_a_cluster_are_measured_and_a_node_without_nixl_is_named(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := refusal():
        pytest.skip(why)
    with nodes(1, spare=1) as cluster:
        with monkeypatch.context() as of_node:
            of_node.setenv("NIXL_PLUGIN_DIR", "/nowhere")
            cluster.join(1)
        sets = (f"runtime.address={cluster.address}", "runtime.kind=ray", "rollout.replicas=2")
        asked = ["check", str(start), *(word for one in sets for word in ("--set", one))]
        command = [*cluster.hosts[0].prefix, sys.executable, "-m", "millrace", *asked]
        measured, refused = (
            subprocess.run([*command, "--run-dir", str(tmp_path), *more], capture_output=True, text=True)
            for more in (["--json"], ["--set", "weights.transport=nixl"])
        )
    assert refused.returncode == 2 and "node 10.77.0.1" not in refused.stderr
    assert 'node 10.77.0.2: `weights.transport` ("nixl")' in refused.stderr
    report = json.loads(measured.stdout)
    assert [(link["source"], link["target"]) for link in report["links"]] == [
        ("10.77.0.1", "10.77.0.2"),
        ("10.77.0.2", "10.77.0.1"),
    ]
    assert all(0.5e8 < link["bytes_per_s"] < 1.5e8 for link in report["links"]), "a gigabit a second"
