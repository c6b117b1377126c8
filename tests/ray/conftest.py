"""One cluster for the tests of a session, and the workers that tests of the local runtime use."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "process"))
collect_ignore_glob = [] if find_spec("ray") else ["test_*.py"]

if find_spec("ray"):
    # Ray reads these when it is imported.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    from tests.ray import clusters

    with clusters.head() as address:
        yield address
