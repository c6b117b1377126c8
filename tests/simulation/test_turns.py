"""Episodes of several turns under every fault: the same promises hold."""

from __future__ import annotations

import pytest

from millrace.core.errors import DigestMismatchError
from millrace_sim.explore.invariants import Invariants
from millrace_sim.explore.worlds import random_world, with_turns
from millrace_sim.simulation import simulate
from tests.long import few

SEEDS, CHUNK = 100, 10


@pytest.mark.parametrize("agents", [False, True])
@pytest.mark.parametrize("first", few(range(0, SEEDS, CHUNK)))
def test_no_storm_breaks_a_promise_to_an_episode(first: int, agents: bool) -> None:
    observed = 0
    for seed in range(first, first + CHUNK):
        scenario = with_turns(random_world(seed), agents=agents)
        promises = Invariants(scenario)
        try:
            outcome = simulate(scenario, promises)
        except DigestMismatchError:
            assert promises.num_corrupted
            continue
        assert outcome.accounting.balanced and not outcome.accounting.in_flight, seed
        observed += len(outcome.of("observed"))
    assert observed > 100
