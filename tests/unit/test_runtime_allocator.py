"""Workers on a GPU allocate in segments that grow, unless the environment says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.long import few

from millrace.runtime.local.launcher import ALLOCATOR, DEFAULTS

READ = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize(
    ("own", "settings"),
    few(
        [
            ({}, "expandable_segments:True"),
            *(({name: "max_split_size_mb:64"}, "max_split_size_mb:64") for name in NAMES),
        ],
        2,
    ),
)
def test_torch_reads_the_setting_of_workers_or_of_the_environment(own: dict[str, str], settings: str) -> None:
    assert DEFAULTS.items() > ALLOCATOR.items()
    kept = {name: value for name, value in os.environ.items() if name not in NAMES}
    environment = {**DEFAULTS, **kept, **own}
    out = subprocess.run([sys.executable, "-c", READ], env=environment, capture_output=True, text=True)
    assert out.stdout.strip() == settings, out.stderr
