"""Samples while a run goes on, and what its processes hold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ledger_records import ready_group, step_of
from observe_events import step

from millrace.conversations.tokenizer import make_character_tokenizer, open_decoder
from millrace.core.events import Event, Events
from millrace.core.types import Group, Trajectory
from millrace.ledger import SqliteLedger
from millrace.run.event_sources import MemoryReporter, TrajectorySampler, spread


class EventRecorder:
    """Events with a clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = Events(lambda: self.now_s, lambda: 0.0)
        self.heard: list[Event] = []
        self.events.subscribe(self.heard.append)

    def of(self, kind: str) -> list[dict]:
        return [event.fields for event in self.heard if event.kind == kind]


def ledger_of(path: Path, *groups: Group) -> SqliteLedger:
    ledger = SqliteLedger(path, run={})
    for version, group in enumerate(groups, 1):
        ledger.admit([group])
        ledger.commit_step(step_of(version, group))
    return ledger


def test_of_every_nth_step_the_best_and_the_worst_of_a_group_are_told(tmp_path: Path) -> None:
    recorder, groups = EventRecorder(), [ready_group(group_id) for group_id in range(4)]
    for group in groups:
        group.members[1].reward = 0.25
    ledger = ledger_of(tmp_path / "ledger.sqlite", *groups)
    sampler = TrajectorySampler(recorder.events, ledger, lambda tokens: f"{len(tokens)} tokens", every=3)
    for version in range(1, 5):
        sampler(step(1.0, version))
    sampler(step(2.0, 3, replayed=True))
    ledger.close()
    samples = recorder.of("sample")
    assert [(s["version"], s["place"], s["trajectory_id"]) for s in samples] == [
        (1, "best", 0), (1, "worst", 1), (3, "best", 4), (3, "worst", 5),
    ]  # fmt: skip
    assert samples[0]["prompt"] == "prompt 0" and samples[0]["completion"] == "4 tokens"
    assert (samples[0]["state"], samples[0]["versions"]) == ("trained", [0])


def test_what_fails_in_a_sample_is_one_warning(tmp_path: Path) -> None:
    recorder, ledger = EventRecorder(), ledger_of(tmp_path / "ledger.sqlite", ready_group(0), ready_group(1))

    def decode(tokens) -> str:
        raise ValueError("no such token")

    sampler = TrajectorySampler(recorder.events, ledger, decode, every=1)
    for version in (1, 2):
        sampler(step(1.0, version))
    ledger.close()
    (warned,) = recorder.of("warned")
    assert warned == {"source": "samples", "reason": "no samples from here on: ValueError: no such token"}


@pytest.mark.parametrize(
    ("rewards", "places"),
    [
        ([], {}),
        ([1.0, 1.0, 1.0], {"best": 0}),
        ([0.0, 1.0], {"best": 1, "worst": 0}),
        ([0.0, 0.5, 1.0, 0.25], {"best": 2, "middle": 3, "worst": 0}),
    ],
)
def test_samples_are_spread_over_the_rewards(rewards: list[float], places: dict[str, int]) -> None:
    group = [Trajectory(index, 0, reward=reward) for index, reward in enumerate(rewards)]
    assert {place: t.trajectory_id for place, t in spread(group).items()} == places


def test_tokens_are_decoded_as_the_reward_sees_them(tmp_path: Path) -> None:
    assert open_decoder(str(tmp_path)) is None
    make_character_tokenizer(tmp_path, "0123456789")
    decode = open_decoder(str(tmp_path))
    assert decode is not None and decode([5, 6, 7, 1]) == "012"


def test_memory_is_told_of_every_process_that_is_up_and_not_too_often() -> None:
    recorder = EventRecorder()
    reporter = MemoryReporter(recorder.events)
    reporter(Event("worker_started", 0.0, 0.0, {"name": "relay", "pid": os.getppid()}))
    reporter(Event("worker_started", 0.0, 0.0, {"name": "simulated", "pid": None}))
    for seconds in (1.0, 5.0, 12.0):
        reporter(Event("report", seconds, 0.0, {}))
    first, second = recorder.of("memory")
    assert second["controller_cpu_s"] >= first["controller_cpu_s"] > 0
    assert first["resident_bytes"].keys() == {"controller", "relay"}
    assert min(*first["resident_bytes"].values(), first["available_bytes"]) > 0
    reporter(Event("worker_died", 20.0, 0.0, {"name": "relay"}))
    reporter(Event("step", 30.0, 0.0, {}))
    assert recorder.of("memory")[-1]["resident_bytes"].keys() == {"controller"}


def test_memory_of_workers_on_other_hosts_is_not_read_from_processes_of_this_one() -> None:
    recorder = EventRecorder()
    reporter = MemoryReporter(recorder.events)
    for name, address in (("here", "127.0.0.1"), ("elsewhere", "192.0.2.1")):  # the second is nobody's
        fields = {"name": name, "pid": os.getppid(), "address": address}
        reporter(Event("worker_started", 0.0, 0.0, fields))
    reporter(Event("report", 1.0, 0.0, {}))
    assert recorder.of("memory")[0]["resident_bytes"].keys() == {"controller", "here"}
    reporter(Event("left", 2.0, 0.0, {"replica": "here"}))
    reporter(Event("report", 20.0, 0.0, {}))
    assert recorder.of("memory")[1]["resident_bytes"].keys() == {"controller"}
