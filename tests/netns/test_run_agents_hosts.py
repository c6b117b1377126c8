"""Agents on one host, and replicas on two hosts with networks of their own."""

from __future__ import annotations

import pytest
from tests.long import long
from tests.namespaces import hosts as namespaces
from tests.runs import events, summary, train, weights
from tests.turn_runs import make_agent_start

from millrace.core.placement import Host
from millrace.run import run_hosts

GB = 1_000_000_000

pytestmark = pytest.mark.usefixtures("warm")


@long
def test_agents_do_not_know_where_their_turns_are_sampled(tmp_path, monkeypatch):
    config = make_agent_start(tmp_path)
    alone = train(config, tmp_path / "alone")
    with namespaces(2) as made:
        found = tuple(Host(host.name, 2, 8 * GB, 8 * GB, address=host.address) for host in made)
        monkeypatch.setattr(run_hosts, "hosts", lambda config, this: found)
        monkeypatch.setattr(run_hosts, "logical", lambda config: {host.name: host.prefix for host in made})
        run = train(config, tmp_path / "run")
    assert {event.fields["replica"] for event in events(run, "leased")} == {"replica-0", "replica-1"}
    assert {event.fields["host"] for event in events(run, "fetched")} >= {made[1].name}
    accounting = summary(run)["accounting"]
    assert accounting["trained"] == accounting["admitted"] == 64
    assert weights(run) == weights(alone)
