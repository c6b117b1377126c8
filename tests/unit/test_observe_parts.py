"""A log of events stays a set of bounded files, which every reader takes as one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from observe_events import event, report, run_ended, run_started, step, worker_died

from millrace.core.errors import StorageError
from millrace.core.events import Event
from millrace.observe.sinks import log_files as parts_module
from millrace.observe.sinks.jsonl import EventLog, read_events
from millrace.observe.sinks.log_files import Tail, opened, parts
from millrace.observe.summary import Summary


def finished(number: int) -> Event:
    return event(
        "finished", 1.0, trajectory_id=number, tokens=5, versions_min=0, versions_max=0, finish="stop"
    )


def scored(number: int, outcome: str = "scored") -> Event:
    return event("scored", 1.0, trajectory_id=number, value=1.0, outcome=outcome, reason="")


def night(steps: int) -> list[Event]:
    events = [run_started()]
    for version in range(1, steps + 1):
        events += [finished(version), scored(version), report(float(version), "replica-0", version, 1.0, 1.0)]
        events.append(step(float(version), version))
    return [*events, scored(0, "failed"), worker_died(99.0, "replica-0"), run_ended(100.0)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log of a night in several parts."""
    path = tmp_path / "events.jsonl"
    log = EventLog(path, part_bytes=4000)
    for item in night(40):
        log(item)
    log.close()
    assert len(parts(path)) > 5
    return path


def test_parts_are_bounded_and_in_order(path: Path) -> None:
    names = [part.name for part in parts(path)]
    assert names[:2] == ["events.000001.jsonl", "events.000002.jsonl"] and names[-1] == "events.jsonl"
    assert all(part.stat().st_size < 5000 for part in parts(path))


def test_what_a_kill_left_of_condensing_is_removed_at_the_next_start(path: Path) -> None:
    part, other = parts(path)[0], path.with_name("metrics.000001.jsonl.partial")
    left_over = part.with_name(f"{part.name}.partial")
    left_over.write_bytes(b"half")
    other.write_bytes(b"another log's")
    EventLog(path).close()
    assert not left_over.exists() and part.exists() and other.exists()


def test_a_reader_sees_every_step_of_all_parts_in_order(path: Path) -> None:
    versions = [item.fields["version"] for item in read_events(path, "step")]
    assert versions == list(range(1, 41))


def test_only_older_parts_leave_out_what_the_ledger_has_too(path: Path) -> None:
    kinds = [item.kind for item in read_events(path)]
    assert kinds.count("finished") < 20 and kinds.count("report") == 40
    newest = {item.fields["trajectory_id"] for item in read_events(path, "finished")}
    assert 40 in newest and 1 not in newest
    assert [e.fields["outcome"] for e in read_events(path, "scored")].count("failed") == 1


def test_the_summary_of_a_long_log_is_that_of_its_events(path: Path) -> None:
    live, read = Summary(), Summary()
    for item in night(40):
        live(item)
    for item in read_events(path):
        read(item)
    assert read.result() == live.result()


def test_a_tail_follows_over_the_end_of_a_part(tmp_path: Path) -> None:
    path, seen = tmp_path / "events.jsonl", []
    tail, log = Tail(path), EventLog(path, part_bytes=4000)
    for item in night(40):
        log(item)
        seen += tail.take()
    log.close()
    assert len(seen) == len(night(40)) and not tail.behind_bytes and not tail.is_lost


def test_a_tail_that_looks_rarely_misses_nothing_of_the_newest_parts(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, part_bytes=4000)
    log(run_started())
    tail = Tail(path, path.stat().st_size)
    while len(parts(path)) < 2:
        log(step(1.0, 1))
    log(step(2.0, 7))
    log.close()
    assert b'"version":7' in tail.take()[-1]


def test_a_tail_reads_all_parts_a_piece_at_a_time(path: Path) -> None:
    tail, lines = Tail(path), []
    assert tail.behind_bytes == tail.size == sum(part.stat().st_size for part in parts(path))
    while taken := tail.take(1000):
        assert sum(map(len, taken)) < 4000
        lines += taken
    with opened(path) as files:
        assert lines == [line.rstrip(b"\n") for _, file in files for line in file]


def test_a_tail_knows_that_its_part_is_gone(path: Path) -> None:
    tail = Tail(path)
    tail.take(100)
    parts_module.condense(parts(path)[0])
    assert tail.is_lost


def test_a_resumed_run_goes_on_in_the_newest_part(path: Path) -> None:
    before = parts(path)
    log = EventLog(path, part_bytes=4000)
    log(run_started(200.0))
    log.close()
    assert parts(path) == before
    assert [item.kind for item in read_events(path)][-1] == "run_started"


def test_parts_are_their_owner_s_alone(path: Path) -> None:
    assert {part.stat().st_mode & 0o777 for part in parts(path)[:-2]} == {0o600}


def test_a_log_that_is_not_there_has_no_parts(tmp_path: Path) -> None:
    assert parts(tmp_path / "events.jsonl") == []
    assert Tail(tmp_path / "events.jsonl").take() == []
    with pytest.raises(FileNotFoundError):
        list(read_events(tmp_path / "events.jsonl"))


def test_a_disk_too_full_to_condense_on_leaves_the_part_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(part: Path) -> None:
        part.with_name(part.name + ".partial").write_bytes(b"{")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(parts_module, "condense", full)
    path = tmp_path / "events.jsonl"
    log = EventLog(path, part_bytes=4000)
    for item in night(40):
        log(item)
    log.close()
    assert sorted(tmp_path.iterdir()) == sorted(parts(path))
    assert sum(item.kind == "finished" for item in read_events(path)) == 40


def test_a_part_that_cannot_be_rotated_is_written_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends the run is that error, and the log still takes the run's end."""

    def refused(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "events.jsonl"
    log = EventLog(path, part_bytes=1)
    monkeypatch.setattr(os, "rename", refused)
    with pytest.raises(StorageError, match="No space left"):
        log(run_started())
    with pytest.raises(StorageError, match="No space left"):
        log(run_ended(100.0))
    log.close()
    assert [item.kind for item in read_events(path)] == ["run_started", "run_ended"]
