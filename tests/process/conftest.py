"""Tests of the runtime hold for both ways of starting a worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import start_methods
from tests.long import few

from millrace.core.types import Endpoint


@pytest.fixture(params=few(start_methods.METHODS))
def start_method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have every `LocalRuntime` start its workers so, here and in scripts that import `start_methods`."""
    monkeypatch.setitem(start_methods.DEFAULTS, "place", start_methods.METHODS[request.param])
    monkeypatch.setenv(start_methods.METHOD, request.param)
    return str(request.param)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model, for a replica in the process of the test."""
    from test_replica_role import model_of

    path = tmp_path_factory.mktemp("model")
    model_of(0).save_pretrained(path)
    return str(path)


@pytest.fixture
def endpoint(tmp_path: Path) -> Endpoint:
    """Versions 0 and 1 of that model."""
    from safetensors.torch import save_file
    from test_replica_role import model_of

    for version in (0, 1):
        weights = {name: p.detach().clone() for name, p in model_of(version).named_parameters()}
        save_file(weights, tmp_path / f"v{version}.safetensors")
    return Endpoint("file", str(tmp_path), 2, 0)
