"""`scripts/gpu-check` meets a GPU seldom, so here it is rehearsed: the same script on the CPU, tiny sizes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
from tests.long import long

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu-check"


def gpu_check(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | variables, check=False)


@long
@pytest.mark.timeout(1800)
def test_a_rehearsal_passes_and_every_part_has_its_figures(tmp_path):
    out = tmp_path / "gpu.json"
    chosen = ["machine", "tests", "trainer-0.6B", "weights", "node-gap"]
    done = gpu_check("--rehearse", "--only", *chosen, "--out", out)
    result = json.loads(out.read_text())
    assert done.returncode == 0 and result["passed"], done.stderr
    assert list(result["parts"]) == chosen and result["rehearsal"]
    tests, weights = result["parts"]["tests"], result["parts"]["weights"]["weights"]
    assert tests["tests"] == tests["skipped"] > 0 and "no GPU" in tests["skipped_because"][0]
    assert weights["stall_s"] > 0 and weights["swap_s"] > 0
    rows = result["parts"]["trainer-0.6B"]["trainer-0.6B"]["rows"]
    assert all(row["mfu"] > 0 for row in rows.values())
    gap, gate = result["parts"]["node-gap"]["gap"], result["gates"]["gap.gap_mean"]
    assert 0 < gap["gap_mean"] < 1e-4 and gap["gap_mean"] <= gap["gap_p999"] <= gap["gap_max"]
    assert gate == {"value": gap["gap_mean"], "limit": "< 0.02", "verdict": None}


def test_parts_that_need_more_gpus_are_skipped_and_fail_nothing(tmp_path):
    out = tmp_path / "gpu.json"
    done = gpu_check("--rehearse", "--gpus", 2, "--only", "node-fsdp", "node-loop", "--out", out)
    result = json.loads(out.read_text())
    assert done.returncode == 0 and "node-fsdp" in done.stderr and "skipped: needs 4 GPUs" in done.stderr
    entries = result["parts"].values()
    assert result["passed"] and [entry["skipped"] for entry in entries] == ["needs 4 GPUs"] * 2


def test_a_gate_gets_a_verdict_and_only_outside_of_a_rehearsal(capsys):
    script = SourceFileLoader("gpu_check", str(SCRIPT)).load_module()
    entry = {"passed": True, "loop": {"served_s_max": 12.5, "checkpoint_stall_s": 0.5}}
    verdicts = [
        [gate["verdict"] for gate in script.gates("node-loop", entry, rehearse=rehearse).values()]
        for rehearse in (False, True)
    ]
    assert verdicts == [["fail", "pass"], [None, None]]
    assert "version being served: 12.5 (must be < 10) fail" in capsys.readouterr().err
    assert script.gates("node-mfu", {"mfu": {"mfu": 0.2}}, rehearse=False) == {}, "no model of 7 B"
    gates = script.gates("node-gap", {"gap": {"gap_p999": 0.3}}, rehearse=False)
    assert gates["gap.gap_p999"]["verdict"] is None


def test_every_gate_is_of_a_part_and_on_the_page():
    script = SourceFileLoader("gpu_check", str(SCRIPT)).load_module()
    page = (SCRIPT.parents[1] / "reports" / "gpu-check.md").read_text()
    for gate in script.GATES:
        limit = f"{gate.sign} {gate.limit:g}" if gate.sign else ""
        row = rf"\| `node-{gate.part}` \| `{gate.figure}` \| {limit} ?\|"
        assert re.search(row, page), row


def test_a_part_that_fails_has_its_error_in_the_file_and_the_next_one_runs(tmp_path):
    out = tmp_path / "gpu.json"
    (tmp_path / "transformers.py").write_text("raise ImportError('a broken transformers')")
    done = gpu_check("--rehearse", "--only", "machine", "trl", "--out", out, PYTHONPATH=str(tmp_path))
    result = json.loads(out.read_text())
    assert done.returncode == 1 and not result["passed"]
    assert [part["passed"] for part in result["parts"].values()] == [False, False]
    assert all("a broken transformers" in part["error"] for part in result["parts"].values())


def test_a_part_that_crashes_after_its_first_figure_has_not_passed(tmp_path):
    script = SourceFileLoader("gpu_check", str(SCRIPT)).load_module()
    killed = "import os; print('{\"passed\": true}', flush=True); os.kill(os.getpid(), 9)"
    part = script.Part("engine", ["-c", killed], 60, script.last_json)
    entry = script.run(part, dict(os.environ), tmp_path / "part", 60)
    assert not entry["passed"] and "exit status -9" in entry["error"]


def test_what_the_machine_lacks_is_named_and_taken_from_wheels(tmp_path):
    """An interpreter without site-packages lacks everything."""
    with zipfile.ZipFile(tmp_path / "msgspec-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("msgspec/__init__.py", "")
    out = tmp_path / "gpu.json"
    command = [
        sys.executable,
        "-S",
        SCRIPT,
        "--rehearse",
        "--only",
        "machine",
        "--wheels",
        tmp_path,
        "--out",
        out,
    ]
    subprocess.run(command, capture_output=True, check=False, env=os.environ | {"PYTHONPATH": ""})
    result = json.loads(out.read_text())
    assert result["carried"] == ["msgspec"]
    assert "pydantic" in result["missing"] and "msgspec" not in result["missing"]
