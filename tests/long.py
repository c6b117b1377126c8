"""What only `make test-long` runs: further seeds, sizes and whole runs of what `make test` runs once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

long = pytest.mark.long


def few(values: Iterable[Any], always: int = 1) -> list[Any]:
    """Values of `parametrize`: the first ones for `make test`, the rest for `make test-long`. A tuple has the
    values of several names."""
    listed = [value if type(value) is tuple else (value,) for value in values]
    return [pytest.param(*value, marks=[long] * (num >= always)) for num, value in enumerate(listed)]
