"""Tests of the runtime hold for both ways of starting a worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import runtime_ways

from millrace.core.types import Endpoint


@pytest.fixture(params=list(runtime_ways.WAYS))
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have every `LocalRuntime` start its workers so, here and in scripts that import `runtime_ways`."""
    monkeypatch.setitem(runtime_ways.DEFAULTS, "place", runtime_ways.WAYS[request.param])
    monkeypatch.setenv(runtime_ways.WAY, request.param)
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
