"""`scripts/lanes`: a lane that did not begin, did not end or ran no test is red, never left out."""

from __future__ import annotations

import re
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def lanes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, in a folder with a Makefile of a lane for each way to end."""
    loader = SourceFileLoader("lanes", str(ROOT / "scripts/lanes"))
    spec = spec_from_loader("lanes", loader)
    assert spec
    module = module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "lanes", module)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    loader.exec_module(module)
    (tmp_path / "Makefile").write_text(
        "smoke-passes:\n\techo '3 passed, 1 skipped in 0.12s'\n\techo '== 2 passed in 65.20s (0:01:05) =='\n"
        "smoke-fails:\n\techo '2 passed, 1 failed, 1 error in 0.12s'; exit 1\n"
        "smoke-skips:\n\techo '4 skipped in 0.12s'\n"
        "smoke-hangs:\n\techo '1 passed in 0.12s'; sleep 600\n"
        "setup-broken:\n\texit 3\n"
        "setup-passes setup-fails setup-skips setup-hangs:\n"
    )
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "LOGS", tmp_path)
    monkeypatch.setattr(module, "SET_UP", {"broken", "passes"})
    return module


def test_what_did_not_run_to_its_end_is_red(lanes: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = {
        o.lane: o.fault for o in lanes.run_all(["passes", "fails", "skips", "broken", "unknown"], smoke=True)
    }
    assert faults["passes"] == ""
    assert faults["fails"].startswith("FAILED")
    assert faults["skips"] == "NO TEST PASSED"
    assert faults["broken"].startswith("NOT RUN")
    assert faults["unknown"].startswith("FAILED"), "there is no such target"
    monkeypatch.setattr(lanes, "SMOKE_TIMEOUT_S", 0.5)
    (hanging,) = lanes.run_all(["hangs"], smoke=True)
    assert hanging.fault.startswith("NOT FINISHED")


def test_counts_are_sums_over_the_commands_of_a_lane(lanes: ModuleType) -> None:
    (passes, fails) = lanes.run_all(["passes", "fails"], smoke=True)
    assert passes.tests == {"passed": 5, "skipped": 1}
    assert fails.tests == {"passed": 2, "failed": 2}


def test_lanes_of_a_change(lanes: ModuleType) -> None:
    assert lanes.lanes_of(["docs/README.md"]) == []
    assert lanes.lanes_of(["tests/ray/test_run.py"]) == ["ray", "long"]
    assert lanes.lanes_of(["src/millrace/config/schema.py"]) == list(lanes.LANES)


def test_every_lane_of_the_makefile_is_in_the_table(lanes: ModuleType) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    smokes = {target.removeprefix("smoke-") for target in targets if target.startswith("smoke-")}
    whole = {target.removeprefix("test-") for target in targets if target.startswith("test-")} - {"core"}
    assert smokes == whole | {"bench"} == set(lanes.LANES)
