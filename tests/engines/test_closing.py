"""A closed engine ends its processes, and its memory goes with the last reference to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from bench import OpenBench
from servers import START
from tests.long import long

from millrace.rollout.protocol import Capabilities

DEADLINE_S = 250.0


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory whose sockets can have names."""
    with TemporaryDirectory() as directory:
        yield Path(directory)


@long
@pytest.mark.computed
@pytest.mark.parametrize("devices", [1, 2])
def test_a_closed_engine_leaves_no_process_and_no_memory(
    devices: int, kind: str, stepwise: bool, can: Capabilities, bench_of: OpenBench, short_path: Path
) -> None:
    if kind in START or (devices > 1 and "rollout.tensor" not in can.settings):
        pytest.skip("of an engine that computes here, and so")
    options = msgspec.structs.replace(bench_of().options, tensor=devices)
    command = [sys.executable, str(Path(__file__).with_name("closed.py")), kind, msgspec.json.encode(options)]
    environment = {**os.environ, "TMPDIR": str(short_path)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["bytes_open"] > 10 * facts["bytes_closed"] or devices > 1 or not stepwise, facts
    assert facts["shared"] == [] and facts["processes"] == []
    assert not [path for path in short_path.rglob("*") if path.is_socket()]
