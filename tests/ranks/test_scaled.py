"""A run of real processes whose replicas join and leave while it trains."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from tests.long import long
from tests.runs import events, summary

from millrace.config.load import load
from millrace.core.errors import WorkerError
from millrace.ledger.reading import LedgerReader
from millrace.run import compose, run_hosts, scaling
from millrace.run_directory import run_directory
from millrace_ui.record.views import run_view

DEADLINE_S = 200.0
LONG = (
    "steps=5000",
    "schedule.kind=millrace",
    "rollout.replicas=1",
    "rollout.max_sequence_tokens=256",
    "sampling.max_tokens=240",
    "sampling.ignore_eos=true",
    "checkpoints.every=1000",
)

pytestmark = pytest.mark.usefixtures("warm")


class Play:
    """A run in this process, and what a test does to it meanwhile. `seen` has all events but reports."""

    def __init__(self, start, run_dir, *options):
        self.run, self.seen = run_directory.create("scaled", run_dir), []
        self._config, self._stop, self._came = (
            load(start, [*LONG, *options]),
            asyncio.Event(),
            asyncio.Event(),
        )
        self._noticed = ""

    def __call__(self, event):
        if event.kind != "report":
            self.seen.append(event)
        elif event.fields["replica"] == self._noticed and _halfway(event.fields):
            pids = {e.fields["name"]: e.fields["pid"] for e in self.of("worker_started")}
            os.kill(pids[self._noticed], signal.SIGTERM)
            self._noticed = ""
        self._came.set()

    def of(self, kind):
        return [event for event in self.seen if event.kind == kind]

    async def until(self, condition):
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._came.clear()
                await self._came.wait()

    async def scale(self, replicas):
        await asyncio.to_thread(scaling.scale, self.run, replicas, timeout_s=DEADLINE_S)

    async def notice(self, name):
        """SIGTERM while it decodes, long before most trajectories end."""
        self._noticed = name
        await self.until(lambda: name in [event.fields["replica"] for event in self.of("left")])

    async def go(self, deeds):
        async with asyncio.TaskGroup() as group:
            group.create_task(compose.train(self._config, self.run, self._stop, self))
            await self.until(lambda: self.of("step"))
            await deeds(self)
            self._stop.set()
        return self.run


def _halfway(load):
    """Its trajectories have some tokens, and less than half of what they will have."""
    return 50 < load["kv_used_tokens"] < 120 * load["running"]


@long
def test_a_run_goes_from_one_to_three_replicas_and_back_and_one_is_told_to_end(start, tmp_path):
    async def deeds(play):
        await play.scale(3)
        await play.notice("replica-1")
        await play.until(lambda: "replica-3" in [event.fields["replica"] for event in play.of("pulled")])
        await play.scale(1)
        steps = len(play.of("step"))
        await play.until(lambda: len(play.of("step")) > steps + 5)

    play = Play(start, tmp_path / "run")
    run = asyncio.run(play.go(deeds))
    replicas = {
        kind: [e.fields["replica"] for e in events(run, kind)] for kind in ("joined", "leaving", "left")
    }
    assert replicas["joined"] == ["replica-1", "replica-2", "replica-3"]
    assert replicas["leaving"][0] == replicas["left"][0] == "replica-1" and len(replicas["left"]) == 3
    assert not events(run, "worker_died") and not events(run, "restarted")

    noticed = events(run, "leaving")[0].fields
    trajectory_ids = set(noticed["trajectories"])
    leases = [e.fields for e in events(run, "leased") if trajectory_ids & set(e.fields["trajectory_ids"])]
    again = [lease for lease in leases if lease["replica"] != "replica-1"]
    moved = trajectory_ids & {tid for lease in again for tid in lease["trajectory_ids"]}
    assert "told to end" in noticed["reason"] and moved
    assert trajectory_ids - moved <= {
        e.fields["trajectory_id"] for e in events(run, "finished")
    }  # before they were taken back
    assert sum(lease["resumed_tokens"] for lease in again) > 0

    accounting = summary(run)["accounting"]
    ended = ("trained", "rejected", "stale", "abandoned", "failed", "in_flight")
    assert accounting["admitted"] == sum(accounting[state] for state in ended)
    assert accounting["abandoned"] == accounting["failed"] == accounting["stale"] == 0
    with LedgerReader(run.ledger) as reader:
        trained = [tid for step in reader.steps() for tid in step.trajectory_ids]
        changes = run_view(reader, run)["fleet"]
    assert len(trained) == len(set(trained))
    assert [change["replicas"] for change in changes] == [2, 3, 2, 3, 2, 1]


def test_hosts_join_a_run_with_their_first_replica_and_leave_with_their_last(start, tmp_path):
    async def deeds(play):
        await play.scale(3)
        await play.until(lambda: {e.fields["host"] for e in play.of("fetched")} == {"host-1", "host-2"})
        for host in ("host-1", "host-2"):
            num_fetched = len([e for e in play.of("fetched") if e.fields["host"] == host])
            await play.until(
                lambda host=host, num_fetched=num_fetched: (
                    len([e for e in play.of("fetched") if e.fields["host"] == host]) > num_fetched + 1
                )
            )
        await play.scale(1)
        await play.scale(2)

    play = Play(start, tmp_path / "run", "runtime.hosts=3")
    run = asyncio.run(play.go(deeds))
    hosts = {e.fields["replica"]: e.fields["host"] for e in events(run, "joined")}
    assert {hosts[f"replica-{i}"] for i in (1, 2)} == {"host-1", "host-2"}
    copies = set()
    for event in play.seen:
        if event.kind == "fetched":
            copies.add((event.fields["host"], event.fields["version"]))
        if event.kind == "pulled" and hosts.get(event.fields["replica"], "localhost") != "localhost":
            assert (hosts[event.fields["replica"]], event.fields["version"]) in copies
    assert {e.fields["replica"] for e in events(run, "leased")} > set(hosts) - {"replica-3"}
    assert not events(run, "worker_died") and summary(run)["ok"]


def test_what_does_not_fit_is_refused_and_the_run_goes_on(start, tmp_path, monkeypatch):
    async def deeds(play):
        with pytest.raises(WorkerError, match=r"stays at 1 replicas: no room for 1 more replica\."):
            await play.scale(2)

    monkeypatch.setattr(run_hosts, "read_memory", lambda: (10**12, 0))
    run = asyncio.run(Play(start, tmp_path / "run").go(deeds))
    assert summary(run)["ok"] and not events(run, "joined")
