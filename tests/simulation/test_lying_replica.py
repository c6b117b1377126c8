"""A replica that does not serve what it was told to serve."""

from __future__ import annotations

import msgspec
import pytest

from millrace.core.errors import DigestMismatchError
from millrace.core.types import Served
from millrace_sim import roles
from millrace_sim.explore.worlds import SCHEDULES, small_config
from millrace_sim.simulation import Scenario, simulate

LIES = {
    "the weights of another version": lambda served: {"digest": "sim-0"},
    "weights of nobody": lambda served: {"digest": "0" * 32},
    "another version": lambda served: {"version": served.version - 1, "digest": "sim-0"},
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("schedule", SCHEDULES[::3], ids=repr)
def test_a_replica_that_serves_something_else_ends_the_run(schedule, lie, monkeypatch):
    class Liar(roles.SimReplica):
        async def pull(self, version: int, endpoint: object) -> Served:
            served = await super().pull(version, endpoint)
            return msgspec.structs.replace(served, **LIES[lie](served)) if version >= 2 else served

    monkeypatch.setattr(roles, "SimReplica", Liar)
    with pytest.raises(DigestMismatchError, match=r"was told to serve version . and serves version"):
        simulate(Scenario(small_config(schedule, steps=16)))
