"""A whole run over two logical hosts: the trainer and a replica on one, a replica on the other."""

from __future__ import annotations

import os
import signal

import pytest
from tests.long import long
from tests.runs import events, summary, train, weights

from millrace.ledger.reading import LedgerReader
from millrace.observe.sinks.jsonl import read_events
from millrace.weights.delta_coding import SPARSE

STEPS, LAST = "steps=8", 8
TWO = "runtime.hosts=2"
FAR = "host-1"

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(scope="module")
def on_one_host(start, warm, tmp_path_factory):
    return train(start, tmp_path_factory.mktemp("one") / "run", STEPS)


@pytest.fixture(scope="module")
def on_two_hosts(start, warm, tmp_path_factory):
    return train(start, tmp_path_factory.mktemp("two") / "run", STEPS, TWO)


def prompts(run):
    with LedgerReader(run.ledger) as reader:
        return [(step.version, step.group_ids, step.trajectory_ids) for step in reader.steps()]


@long
def test_two_hosts_train_the_same_prompts_to_the_same_weights_as_one(on_one_host, on_two_hosts):
    assert prompts(on_two_hosts) == prompts(on_one_host)
    assert weights(on_two_hosts) == weights(on_one_host)


def test_each_replica_pulls_on_its_own_host_what_that_got_from_the_trainers(on_two_hosts):
    [began] = events(on_two_hosts, "run_started")
    assert began.fields["hosts"] == {"replica-0": "localhost", "replica-1": FAR}
    fetched = events(on_two_hosts, "fetched")
    assert [e.fields["version"] for e in fetched][:LAST] == list(range(LAST)), "the last is needed by nobody"
    assert {e.fields["host"] for e in fetched} == {FAR}
    assert all(e.fields["source"] and e.fields["received_bytes"] for e in fetched)
    versions = set()
    for event in read_events(on_two_hosts.events):
        if event.kind == "fetched":
            versions.add(event.fields["version"])
        if event.kind == "pulled" and event.fields["replica"] == "replica-1":
            assert event.fields["version"] in versions
    leased = {e.fields["replica"] for e in events(on_two_hosts, "leased")}
    assert leased == {"replica-0", "replica-1"}, "both hosts had a share of the groups"


def test_a_replica_serves_versions_that_its_host_got_as_deltas(start, tmp_path):
    """At this learning rate few published elements change. With two slots the trainer's host is busy with its
    share for longer than a fetch takes, so the other one gets its own."""
    rare = ("model.dtype=bfloat16", "optimizer.lr=1e-6", "rollout.slots=2")
    run = train(start, tmp_path / "run", STEPS, TWO, *rare)
    digests = {e.fields["version"]: e.fields["digest"] for e in events(run, "published")}
    changed = {version for version in digests if digests[version] != digests.get(version - 1)}
    encoded = {
        e.fields["version"]
        for e in events(run, "fetched")
        if e.fields["host"] == FAR
        and SPARSE in e.fields["encodings"]
        and 10 * e.fields["received_bytes"] < e.fields["decoded_bytes"]
    }
    far = [e for e in read_events(run.events) if e.fields.get("replica") == "replica-1"]
    pulled = {e.fields["version"]: e.fields["digest"] for e in far if e.kind == "pulled"}
    assert pulled.items() <= digests.items(), "what it computes with is what the trainer has"
    assert changed & encoded & pulled.keys() & {e.fields["version"] for e in far if e.kind == "leased"}


class Killer:
    """A sink that kills the relay of the other host once, when that has just got version 1."""

    def __init__(self):
        self._pid, self.killed = None, False

    def __call__(self, event):
        if event.kind == "worker_started" and event.fields["name"] == f"relay-{FAR}":
            self._pid = event.fields["pid"]
        if event.kind == "fetched" and event.fields["version"] == 1 and not self.killed:
            self.killed = True
            os.kill(self._pid, signal.SIGKILL)


def test_a_killed_relay_of_the_other_host_gets_the_newest_version_again(start, on_one_host, tmp_path):
    killer = Killer()
    run = train(start, tmp_path / "run", STEPS, TWO, sinks=(killer,))
    assert [e.fields["name"] for e in events(run, "worker_died")] == [f"relay-{FAR}"]
    died = events(run, "worker_died")[0].time_s
    after = [e.fields["version"] for e in events(run, "fetched") if e.time_s > died]
    assert after and min(after) >= 1, "its next incarnation goes on from the newest"
    accounting = summary(run)["accounting"]
    assert accounting["trained"] == accounting["admitted"] == 16 * LAST
    assert weights(run) == weights(on_one_host)


def test_the_secret_of_the_relays_is_in_no_file_of_the_run(start, tmp_path, monkeypatch):
    monkeypatch.setattr("millrace.run.compose.token_hex", lambda num: "not-to-be-found" * num)
    run = train(start, tmp_path / "run", TWO, "steps=1")
    assert events(run, "fetched")
    for path in run.path.rglob("*"):
        assert not path.is_file() or b"not-to-be-found" not in path.read_bytes(), path
