"""What `nvidia-smi` tells of sick GPUs, from one that is played by a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.devices.inventory import faults, gpu_faults

WELL = "0, NVIDIA H100 80GB HBM3, 0, 0x0000000000000004\n"
SICK = "1, NVIDIA H100 80GB HBM3, 3, 0x0000000000000040\n"
SILENT = "2, NVIDIA GeForce RTX 4090, [N/A], [N/A]\n"


def fake(directory: Path, known: str) -> str:
    """A directory with an `nvidia-smi` that knows only the queries that contain `known`."""
    script = directory / "nvidia-smi"
    command = f"cat <<END\n{WELL}{SICK}{SILENT}END"
    script.write_text(f'#!/bin/sh\ncase "$1" in *{known}*) ;; *) exit 2 ;; esac\n{command}\n')
    script.chmod(0o755)
    return f"{directory}:/usr/bin:/bin"


@pytest.mark.parametrize("known", ["clocks_event_reasons.active", "clocks_throttle_reasons.active"])
def test_a_gpu_with_errors_and_one_that_is_slowed_are_told_whatever_the_driver_calls_it(
    known: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", fake(tmp_path, known))
    errors, slow = gpu_faults({0, 1, 2})
    assert errors.startswith("GPU 1 (NVIDIA H100 80GB HBM3) has had 3 memory errors")
    assert slow.startswith("GPU 1 (NVIDIA H100 80GB HBM3) is slow: its hardware halves its clocks")
    assert gpu_faults({0}) == []


def test_without_a_gpu_or_an_answer_nothing_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake(tmp_path, "nothing-that-is-asked"))
    assert gpu_faults({0}) == [] and gpu_faults(()) == []
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpu_faults({0}) == []


def test_what_is_no_table_is_no_fault() -> None:
    assert list(faults("No devices were found\n", {0})) == []
