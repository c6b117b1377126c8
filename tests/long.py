"""What only `make test-long` runs: further seeds, sizes and whole runs of what `make test` runs once."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

long = pytest.mark.long


def few(values: Iterable[Any], always: int = 1) -> list[Any]:
    """Values of `parametrize`: the first ones for `make test`, the rest for `make test-long`. A tuple has the
    values of several names."""
    listed = [value if type(value) is tuple else (value,) for value in values]
    return [pytest.param(*value, marks=[long] * (num >= always)) for num, value in enumerate(listed)]


def covering(*axes: Iterable[Any]) -> list[Any]:
    """All combinations of values of several names. `make test` has each value once or more often, in as many
    combinations as the longest axis has values: the first with the first, the second with the second."""
    listed = [list(axis) for axis in axes]
    always = {tuple(num % len(axis) for axis in listed) for num in range(max(map(len, listed)))}
    return [
        pytest.param(
            *(axis[at] for axis, at in zip(listed, place, strict=True)), marks=[long] * (place not in always)
        )
        for place in product(*(range(len(axis)) for axis in listed))
    ]
