"""A closed engine ends its processes, and its memory goes with the last reference to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from bench import OpenBench

from millrace.rollout.protocol import Capabilities

DEADLINE_S = 250.0


@pytest.mark.computed
@pytest.mark.parametrize("devices", [1, 2])
def test_a_closed_engine_leaves_no_process_and_no_memory(
    devices: int, kind: str, stepwise: bool, can: Capabilities, bench_of: OpenBench
) -> None:
    if kind == "server" or (devices > 1 and "rollout.tensor" not in can.settings):
        pytest.skip("of an engine that computes here, and so")
    if kind == "vllm" and devices > 1 and not stepwise:
        pytest.skip("with several devices vLLM is always stepwise")
    options = msgspec.structs.replace(bench_of().options, tensor=devices)
    command = [sys.executable, str(Path(__file__).with_name("closed.py")), kind, msgspec.json.encode(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["bytes_open"] > 10 * told["bytes_closed"] or devices > 1 or not stepwise, told
    assert told["shared"] == [] and told["processes"] == []
