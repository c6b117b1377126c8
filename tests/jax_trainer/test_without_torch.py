"""The trainer's process needs no torch."""

from __future__ import annotations

import subprocess
import sys

WORKER = """
import sys
sys.modules["torch"] = None
import millrace_jax.policy, millrace_jax.publisher, millrace_jax.role
import millrace_jax.files.convert, millrace_jax.files.model_directory
"""


def test_the_worker_and_all_that_it_imports_name_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
