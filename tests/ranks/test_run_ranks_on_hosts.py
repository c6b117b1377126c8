"""A whole run whose trainer has ranks on two logical hosts, with replicas on these and on a third."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest
from tests.long import long
from tests.runs import events, summary, train, weights

from millrace.ledger.reading import LedgerReader
from millrace.observe.sinks.jsonl import read_events

RUN = ("steps=8", "trainer.shard=2", "rollout.replicas=3")
HOSTS = ("runtime.hosts=3", "trainer.hosts=2")
LAST, SECOND, THIRD = 8, "host-1", "host-2"

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(scope="module")
def on_one_host(start, warm, tmp_path_factory):
    return train(start, tmp_path_factory.mktemp("one") / "run", *RUN)


@pytest.fixture(scope="module")
def on_hosts(start, warm, tmp_path_factory):
    return train(start, tmp_path_factory.mktemp("several") / "run", *RUN, *HOSTS)


def prompts(run):
    with LedgerReader(run.ledger) as reader:
        return [(step.version, step.group_ids, step.trajectory_ids) for step in reader.steps()]


def assert_whole(run):
    """Every trajectory was trained once, and nobody served anything but what was published."""
    accounting = summary(run)["accounting"]
    assert accounting["trained"] == accounting["admitted"] == 16 * LAST
    copies, digests = set(), {}
    for event in read_events(run.events):
        if event.kind == "fetched":
            copies.add((event.fields["host"], event.fields["version"]))
            digests.setdefault(event.fields["version"], event.fields["digest"])
            assert digests[event.fields["version"]] == event.fields["digest"]
        if event.kind == "pulled":
            host = ["localhost", SECOND, THIRD][int(event.fields["replica"][-1])]
            assert (host, event.fields["version"]) in copies
            assert event.fields["digest"] == digests[event.fields["version"]]


@long
def test_ranks_on_two_hosts_train_the_same_prompts_to_the_same_weights_as_on_one(on_one_host, on_hosts):
    assert prompts(on_hosts) == prompts(on_one_host)
    assert weights(on_hosts) == weights(on_one_host)
    assert_whole(on_hosts)


def test_no_host_sends_more_than_one_version_for_each_that_is_published(on_hosts):
    published = events(on_hosts, "published")
    (num_bytes,) = {e.fields["weights_bytes"] for e in published}
    fetched = [e.fields for e in events(on_hosts, "fetched") if e.fields["received_bytes"]]
    sent = Counter[str]()
    for one in fetched:
        sent[one["source"]] += one["decoded_bytes"]
    assert len(sent) == 3 and max(sent.values()) <= num_bytes * len(published)
    assert {one["decoded_bytes"] for one in fetched if one["host"] == THIRD} == {num_bytes}
    assert {one["decoded_bytes"] < num_bytes for one in fetched if one["host"] != THIRD} == {True}


class Killer:
    """A sink that kills one process once, when `due` says so of an event."""

    def __init__(self, name, due, rank=0):
        self._name, self._due, self._rank = name, due, rank
        self._pid, self.killed = None, False

    def __call__(self, event):
        if event.kind == "worker_started" and event.fields["name"] == self._name:
            self._pid = (event.fields.get("pids") or [event.fields["pid"]])[self._rank]
        if not self.killed and self._due(event):
            self.killed = True
            os.kill(self._pid, signal.SIGKILL)


@long
@pytest.mark.parametrize("kind", ["step", "published"])
def test_the_rank_on_the_second_host_is_killed_and_the_result_is_the_same(kind, start, on_one_host, tmp_path):
    killer = Killer("trainer", lambda e: e.kind == kind and e.fields["version"] == 3, rank=1)
    run = train(start, tmp_path / "run", *RUN, *HOSTS, sinks=(killer,))
    (death,) = events(run, "worker_died")
    assert death.fields["name"] == "trainer" and "rank 1: killed by signal 9" in death.fields["cause"]
    assert not events(run, "replay_differs")
    assert_whole(run)
    assert weights(run) == weights(on_one_host)


@long
@pytest.mark.parametrize("host", ["localhost", SECOND])
def test_the_relay_of_a_trainers_host_is_killed_and_only_its_ranks_write_again(
    host, start, on_one_host, tmp_path
):
    killer = Killer(f"relay-{host}", lambda e: e.kind == "published" and e.fields["version"] == 3)
    run = train(start, tmp_path / "run", *RUN, *HOSTS, sinks=(killer,))
    assert [e.fields["name"] for e in events(run, "worker_died")] == [f"relay-{host}"]
    assert_whole(run)
    assert weights(run) == weights(on_one_host)
