"""Every test here needs network namespaces. Where they are not permitted, it is skipped and says why."""

from __future__ import annotations

import pytest
from tests.namespaces import refusal


@pytest.fixture(scope="session", autouse=True)
def _namespaces() -> None:
    if why := refusal():
        pytest.skip(why)
