from __future__ import annotations

from pathlib import Path

import pytest
from tests.runs import make_start


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's attention on a CPU begins at heads of 32."""
    return make_start(tmp_path_factory.mktemp("start"), head_dim=32)
