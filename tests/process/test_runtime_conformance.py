"""The local runtime passes the scenarios that every runtime passes, however it starts its workers."""

import asyncio

import pytest
from start_methods import METHODS

from conformance import SCENARIOS, Scenario
from millrace.runtime.local.local_runtime import LocalRuntime


@pytest.mark.usefixtures("start_method")
@pytest.mark.parametrize("start_method", METHODS, indirect=True)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_local_runtime_conforms(scenario: Scenario) -> None:
    asyncio.run(scenario(LocalRuntime))
