"""The trainer's process needs no torch."""

from __future__ import annotations

import subprocess
import sys

WORKER = """
import sys
sys.modules["torch"] = None
import millrace.jax_trainer.policy, millrace.jax_trainer.publisher, millrace.jax_trainer.role
import millrace.jax_trainer.files.convert, millrace.jax_trainer.files.model_directory
"""


def test_the_worker_and_all_that_it_imports_name_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
