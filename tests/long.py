"""What only `make test-long` runs: further seeds, sizes and whole runs of what `make test` runs once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

long = pytest.mark.long


def few(values: Iterable[Any], always: int = 1) -> list[Any]:
    """Values of `parametrize`: the first ones for `make test`, the rest for `make test-long`."""
    listed = list(values)
    return [*listed[:always], *(pytest.param(value, marks=long) for value in listed[always:])]
