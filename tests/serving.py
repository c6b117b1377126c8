"""vLLM in the tests: what whole runs with it share, and servers as processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from millrace.core.errors import WorkerError
from millrace.engines.server.connect import wait_for

PYTHON = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
SGLANG = Path(__file__).parents[1] / ".venv-sglang" / "bin" / "python"
WITH_VLLM = [
    pytest.mark.skipif(not PYTHON.exists(), reason="`make setup-vllm` has not been run"),
    pytest.mark.usefixtures("warm"),
    pytest.mark.timeout(900),
]
"""Marks of whole runs."""
LONG = ("sampling.max_tokens=52", "rollout.max_sequence_tokens=64")
"""Completions that are still on their way when a report tells of them."""

READY_S = 600.0
SEQUENCE, SLOTS_MAX = 256, 24
ARGUMENTS = {
    "load-format": "dummy",
    "logprobs-mode": "processed_logprobs",
    "generation-config": "vllm",
    "dtype": "float32",
    "hf-overrides": '{"tie_word_embeddings": false}',
    "max-model-len": SEQUENCE,
    "max-num-batched-tokens": 2 * SEQUENCE,
    "max-num-seqs": SLOTS_MAX + 1,
    "block-size": 32,
    "kv-cache-memory-bytes": 64 * 2**20,
}
FLAGS = ("--tokens-only", "--no-enable-chunked-prefill", "--enforce-eager", "--disable-uvicorn-access-log")
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def start_server(
    model: Path, port: int, log: Path, *, python: str = sys.executable, **changed: Any
) -> subprocess.Popen[bytes]:
    """What `vllm serve` starts: the command wants a package called vllm, and the build for CPUs is called
    vllm-cpu. The leader of a process group. `changed`: arguments; None leaves one out."""
    arguments = {name: value for name, value in (ARGUMENTS | changed).items() if value is not None}
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), *FLAGS]
    command += [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env=os.environ | ENVIRONMENT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def start_sglang(model: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    """SGLang itself, of `.venv-sglang`, with `sglang_stub` in place of what it never calls on a CPU. There it
    has no noise of a request's own."""
    arguments = {
        "model-path": model,
        "port": port,
        "device": "cpu",
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        "grammar-backend": "none",
        "dtype": "float32",
        "context-length": SEQUENCE + 6,
        "max-running-requests": SLOTS_MAX + 1,
        "max-total-tokens": SLOTS_MAX * SEQUENCE,
        "mem-fraction-static": 0.2,
    }
    command = [str(SGLANG), "-m", "sglang.launch_server", "--disable-overlap-schedule"]
    command += ["--skip-tokenizer-init", "--incremental-streaming-output", "--sleep-on-idle"]
    command += [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parent / "sglang_stub"),
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    with log.open("wb") as output:
        return subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def start_standin(model: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    """See tests/engines/sglang_standin.py."""
    script = Path(__file__).parent / "engines" / "sglang_standin.py"
    command = [sys.executable, str(script), str(model), str(port), str(SLOTS_MAX + 1), str(SEQUENCE)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        return subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end_s = time.monotonic() + READY_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise AssertionError(f"the server ended: {log.read_text(errors='replace')[-3000:]}")
        with suppress(WorkerError):
            return wait_for(url, 2.0).close()
    raise AssertionError(f"no server after {READY_S:g} s: {log.read_text(errors='replace')[-3000:]}")


def end(process: subprocess.Popen[bytes]) -> None:
    """And every process that it started. A server that is asked to end removes its shared memory."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(20.0)
    kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """And every process that it started, with SIGKILL."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
