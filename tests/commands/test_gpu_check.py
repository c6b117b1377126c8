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
    chosen = ["machine", "decode", "training", "weights", "node-gap", "tests"]
    done = gpu_check("--rehearse", "--only", *chosen, "--out", out)
    result = json.loads(out.read_text())
    assert done.returncode == 0 and result["passed"], done.stderr
    assert list(result["parts"]) == chosen and result["rehearsal"]
    tests, weights = result["parts"]["tests"], result["parts"]["weights"]["weights"]
    assert tests["tests"] == tests["skipped"] > 0 and "no GPU" in tests["skipped_because"][0]
    assert weights["stall_s"] > 0 and weights["swap_s"] > 0
    rows = result["parts"]["training"]["training"]["rows"]
    assert list(rows) == ["4096", "16384"] and all(row["mfu"] > 0 for row in rows.values())
    rows = result["parts"]["decode"]["decode"]["rows"]
    assert list(rows) == ["32", "256"] and all(row["over_roofline"] > 0 for row in rows.values())
    gap, gate = result["parts"]["node-gap"]["gap"], result["gates"]["gap.gap_mean"]
    assert 0 < gap["gap_mean"] < 1e-4 and gap["gap_mean"] <= gap["gap_p999"] <= gap["gap_max"]
    assert (gate["value"], gate["limit"], gate["verdict"]) == (gap["gap_mean"], "< 0.02", None)
    page = tmp_path / "page.md"
    page.write_text("<!-- scripts/gpu-check --write -->\n<!-- end -->\n")
    assert gpu_check("--write", out, "--page", page).returncode == 0
    assert all(f"| `{name}` | " in page.read_text() for name in chosen[1:])


def test_parts_that_need_more_gpus_are_skipped_and_fail_nothing(tmp_path):
    out = tmp_path / "gpu.json"
    done = gpu_check("--rehearse", "--gpus", 2, "--only", "node-fsdp", "node-loop", "--out", out)
    result = json.loads(out.read_text())
    assert done.returncode == 0 and "node-fsdp" in done.stderr and "skipped: needs 4 GPUs" in done.stderr
    entries = result["parts"].values()
    assert result["passed"] and [entry["skipped"] for entry in entries] == ["needs 4 GPUs"] * 2


def test_a_gate_gets_a_verdict_and_only_outside_of_a_rehearsal():
    script = SourceFileLoader("gpu_check", str(SCRIPT)).load_module()
    entry = {"passed": True, "loop": {"served_s_max": 12.5, "checkpoint_stall_s": 0.5}}
    verdicts = [
        [gate["verdict"] for gate in script.gates("node-loop", entry, rehearse=rehearse).values()]
        for rehearse in (False, True)
    ]
    assert verdicts == [["fail", "pass"], [None, None]]
    gate = script.gates("node-loop", entry, rehearse=False)["loop.served_s_max"]
    assert "version being served: 12.5 (must be < 10) fail" in script.gate_line(gate)
    assert script.gates("node-mfu", {"mfu": {"mfu": 0.2}}, rehearse=False) == {}, "no model of 7 B"
    gates = script.gates("node-gap", {"gap": {"gap_p999": 0.3}}, rehearse=False)
    assert gates["gap.gap_p999"]["verdict"] is None


def test_every_gate_is_of_a_part_and_on_the_page():
    script = SourceFileLoader("gpu_check", str(SCRIPT)).load_module()
    page = (SCRIPT.parents[1] / "reports" / "gpu-check.md").read_text()
    for gate in script.GATES:
        row = rf"\| `{gate.part}` \| `{gate.figure}` \| {gate.must_be} ?\|"
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


PARTS = """
import json, sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

script, (log, *parts) = SourceFileLoader("gpu_check", sys.argv[1]).load_module(), json.loads(sys.argv[2])

def part(name, code, deadline_s):
    begun = f"open({log!r}, 'a').write({name + ' '!r})"
    tail = "print('{}', flush=True)"
    return script.Part(name, ["-c", f"{begun}; {tail}; {code}"], deadline_s, script.last_json)

script.parts = lambda options, scratch: [part(*one) for one in parts]
sys.argv = [sys.argv[1], *sys.argv[3:]]
sys.exit(script.main())
"""


def with_parts(log, parts, *arguments):
    """The script with other parts: name, code, deadline. Each writes its name into `log` when it begins."""
    told = json.dumps([str(log), *parts])
    command = [sys.executable, "-c", PARTS, SCRIPT, told, "--rehearse", *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_what_was_killed_goes_on_with_the_part_that_was_cut_off(tmp_path):
    out, log = tmp_path / "gpu.json", tmp_path / "log"
    parts = [("quick", "0", 60), ("long", "import time; time.sleep(600)", 60), ("last", "0", 60)]
    killed = with_parts(log, parts, "--out", out)
    while not log.exists() or "long" not in log.read_text():
        assert killed.poll() is None
    killed.kill()
    killed.communicate()
    result = json.loads(out.read_text())
    assert list(result["parts"]) == ["quick", "long"] and not result["passed"]
    assert result["parts"]["long"]["error"] == "it was cut off"
    parts[1] = ("long", "0", 60)
    again = with_parts(log, parts, "--out", out)
    assert "quick                    is in" in again.communicate()[1] and again.returncode == 0
    assert log.read_text().split() == ["quick", "long", "long", "last"]
    assert with_parts(log, parts, "--out", out, "--anew", "--only", "last").wait() == 0
    assert log.read_text().split()[-2:] == ["last", "last"]
    assert list(json.loads(out.read_text())["parts"]) == ["quick", "long", "last"]


def test_a_part_that_failed_is_not_run_again_and_one_of_another_command_is(tmp_path):
    out, log = tmp_path / "gpu.json", tmp_path / "log"
    failing, quick = ("failing", "raise SystemExit(1)", 60), ("quick", "0", 60)
    for other in (quick, quick, ("quick", "1", 60)):
        assert with_parts(log, [failing, other], "--out", out).wait() == 1
    assert log.read_text().split() == ["failing", "quick", "quick"]


def test_parts_that_do_not_fit_into_the_lease_are_not_begun_and_shorter_ones_are(tmp_path):
    out, log = tmp_path / "gpu.json", tmp_path / "log"
    parts = [("long", "0", 1000), ("short", "0", 60)]
    short = with_parts(log, parts, "--out", out, "--minutes", 2)
    said, result = short.communicate()[1], json.loads(out.read_text())
    assert short.returncode == 1 and result["not_begun"] == ["long"] and log.read_text() == "short "
    assert "not begun: long. The same command goes on with them" in said
    assert with_parts(log, parts, "--out", out).wait() == 0
    assert log.read_text() == "short long "


def test_a_file_of_other_sources_is_kept_under_another_name(tmp_path):
    out, log = tmp_path / "gpu.json", tmp_path / "log"
    quick = [("quick", "0", 60)]
    assert with_parts(log, quick, "--out", out).wait() == 0
    out.write_text(out.read_text().replace('"sources": "', '"sources": "other'))
    assert with_parts(log, quick, "--out", out).wait() == 0
    assert log.read_text() == "quick quick " and "other" in (tmp_path / "gpu.json.before").read_text()


def test_a_rehearsal_is_not_written_into_the_report(tmp_path):
    out = tmp_path / "gpu.json"
    assert with_parts(tmp_path / "log", [("quick", "0", 60)], "--out", out).wait() == 0
    done = gpu_check("--write", out)
    assert done.returncode == 1 and "is a rehearsal" in done.stderr


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
