"""The millrace preset under the real controller, with everything that can go wrong."""

import pytest

from millrace.config.tables.schedules import Millrace
from millrace_sim.explore.invariants import Invariants
from millrace_sim.explore.verdicts import try_seed
from millrace_sim.explore.worlds import crowded, small_config
from millrace_sim.simulation import Scenario, simulate
from tests.long import long


@long
@pytest.mark.parametrize("schedule", [Millrace(repack_interval_s=0.5), Millrace(staleness_max=None)])
def test_no_fault_breaks_an_invariant(schedule):
    ended = 0
    for seed in range(12):
        config = small_config(schedule, steps=5, replicas=1 + seed % 4, seed=seed)
        if seed % 3 == 0:
            config = crowded(config)
        verdict = try_seed(seed, config=config)
        assert not verdict.problem, verdict
        ended += not verdict.noticed_corruption
    assert ended >= 10


def test_what_a_replica_has_left_is_spread_over_others_and_goes_on_there():
    scenario = Scenario(crowded(small_config(Millrace(repack_interval_s=0.2), steps=20, seed=1)))
    outcome = simulate(scenario, Invariants(scenario))
    shares: dict[tuple[float, str], list[str]] = {}
    for at, event in enumerate(outcome.events):
        if event.kind == "moved":
            shares.setdefault((event.time_s, event.fields["source"]), []).append(event.fields["destination"])
            earlier = (e.fields for e in outcome.events[:at][::-1] if e.kind == "leased")
            lease = next(fields for fields in earlier if fields["replica"] == event.fields["destination"])
            assert lease["trajectory_ids"] == event.fields["trajectories"]
    assert any(len(destinations) > 1 for destinations in shares.values())
    assert all(len(set(destinations)) == len(destinations) for destinations in shares.values())
    assert outcome.accounting.trained == outcome.accounting.admitted
