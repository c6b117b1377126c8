"""A closed engine ends its processes, and its memory goes with the last reference to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench import OpenBench

DEADLINE_S = 120.0


@pytest.mark.computed
def test_a_closed_engine_leaves_no_process_and_no_memory(kind: str, bench_of: OpenBench) -> None:
    if kind == "server":
        pytest.skip("it starts no process")
    options = bench_of().options
    command = [sys.executable, str(Path(__file__).with_name("closed.py")), kind, options.model_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["bytes_open"] > 10 * told["bytes_closed"], told
    assert told["children"] == []
