"""Ray clusters of this machine, for tests: started by `ray start`, ended with all their processes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from millrace_ray.cluster import ENVIRONMENT

RAY = (str(Path(sys.executable).parent / "ray"), "start", "--block", "--disable-usage-stats")
END_S = 15.0
FEW = ("--num-cpus=2", "--num-gpus=0", "--object-store-memory=100000000", "--include-log-monitor=false")
"""What a small node takes."""


@contextmanager
def head() -> Iterator[str]:
    """A cluster of one node. Yields its address."""
    port = free_port()
    with node("--head", f"--port={port}", "--node-ip-address=127.0.0.1", "--include-dashboard=false"):
        yield f"127.0.0.1:{port}"


@contextmanager
def node(*options: str, command: tuple[str, ...] = RAY) -> Iterator[subprocess.Popen[bytes]]:
    """One node. It ends with the block, and with it whatever runs there."""
    files = tempfile.mkdtemp(prefix="ray")  # short: the names of sockets are bounded
    head, log_path = ("--temp-dir=" + files,) if "--head" in options else (), Path(files, "start.log")
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*command, *FEW, *options, *head],
            env={**os.environ, **ENVIRONMENT},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until_started(process, log_path)
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):  # one that is cut off from its head does not end by itself
            process.wait(END_S)
        process.kill()
        process.wait()
        shutil.rmtree(files, ignore_errors=True)


def wait_until_started(process: subprocess.Popen[bytes], log: Path) -> None:
    while "Ray runtime started" not in (text := log.read_text()):
        if process.poll() is not None:
            raise RuntimeError(f"the node ended as it started:\n{text}")
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
