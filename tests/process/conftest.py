"""Tests of the runtime hold for both ways of starting a worker."""

from __future__ import annotations

import pytest
import runtime_ways


@pytest.fixture(params=list(runtime_ways.WAYS))
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have every `LocalRuntime` start its workers so, here and in scripts that import `runtime_ways`."""
    monkeypatch.setitem(runtime_ways.DEFAULTS, "place", runtime_ways.WAYS[request.param])
    monkeypatch.setenv(runtime_ways.WAY, request.param)
    return str(request.param)
