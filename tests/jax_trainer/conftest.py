"""Eight simulated devices, and programs that compile fast. Without JAX these tests are skipped."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
collect_ignore_glob = [] if find_spec("jax") else ["test_*.py"]

FLAGS = [
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300",
]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
os.environ["JAX_CPU_ENABLE_ASYNC_DISPATCH"] = "false"  # programs of eight devices share few threads
