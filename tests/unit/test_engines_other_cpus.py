"""The engine's promises hold with the kernels that other CPUs are given.

Environment variables limit what torch, MKL and oneDNN use; they are read when torch is imported, so the tests
run in processes of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.long import few

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "DNNL_MAX_CPU_ISA": "AVX2"}
SSE = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "DNNL_MAX_CPU_ISA": "SSE41"}
TWO_THREADS = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
CPUS = {"SSE": SSE, "AVX2, two threads": AVX2 | TWO_THREADS}
TESTS = ("test_engines_determinism.py", "test_engines_parity.py", "test_engines_swap.py")
SELECTED = "biases or bfloat16"


@pytest.mark.parametrize("cpu", few(CPUS))
def test_exactness_and_parity_hold_on_other_cpus(cpu: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **CPUS[cpu]}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", SELECTED, *TESTS],
        cwd=Path(__file__).parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
