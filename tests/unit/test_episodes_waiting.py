"""The episodes of a live run that wait, on its page: for whom, how long, in which turn."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from ledger_records import GROUP_SIZE, lease, make_group
from observe_events import run_started
from tests.look_runs import config

from millrace.config.freeze import record
from millrace.config.tables.task import EnvironmentRewardSection
from millrace.core import clock
from millrace.core.events import Event
from millrace.core.types import Finish, State
from millrace.ledger import SqliteLedger
from millrace.observe.sinks.jsonl import EventLog
from millrace.run_directory.run_directory import RunDirectory
from millrace_ui.overview import Overview
from millrace_ui.record.story import SHOWN_MAX
from millrace_ui.site import Site

GROUPS = 20


def ago(kind: str, age_s: float, **fields: object) -> Event:
    return Event(kind, 0.0, clock.wall() - age_s, fields)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[RunDirectory, SqliteLedger, EventLog]]:
    """A run under way. Trajectory 0 waits for its environment after turn 2. Trajectory 1 has an answer, and
    waits for turn 2. All others are in their first turn."""
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    made = config(tmp_path / "start")
    update = {"reward": EnvironmentRewardSection(path="search.py:Search")}
    record(made.model_copy(update=update), run.config)
    groups = [make_group(index) for index in range(GROUPS)]
    members = [member for group in groups for member in group.members]
    for member in members:
        lease(member)
        member.columns.append(5, -0.5, 0)
    members[0].columns.observe([6, 7])
    members[0].columns.append(5, -0.5, 0)
    members[0].state, members[0].finish = State.WAITING, Finish.TURN
    members[1].columns.observe([6])
    members[1].state = State.QUEUED
    ledger = SqliteLedger(run.ledger, run={})
    ledger.admit(groups)
    ledger.flush()
    log = EventLog(run.events)
    log(run_started())
    ids = [member.trajectory_id for member in members]
    log(ago("leased", 300.0, trajectory_ids=ids, replica="r", version=0, resumed_tokens=0))
    for trajectory_id, age_s in (1, 250.0), (0, 200.0):
        log(ago("finished", age_s, trajectory_id=trajectory_id, tokens=1, finish="turn"))
    log(ago("observed", 100.0, trajectory_id=1, tokens=1))
    yield run, ledger, log
    ledger.close()
    log.close()


def rows(html: str) -> list[list[str]]:
    found = (re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", html))
    return [row for row in found if row]


def waiting(run: RunDirectory) -> str:
    overview = Overview("run", run, "/samples/run")
    overview.update()
    return overview.html_by_id()["waiting"]


def test_the_page_lists_who_waits_for_whom_since_when_in_which_turn(live) -> None:
    run, _, log = live
    for index in range(2, GROUPS * GROUP_SIZE):
        log(ago("ended", 50.0, trajectory_id=index, state="rejected", reason=""))
    html = waiting(run)
    assert re.search(r"1 for the model \(longest \d:\d\d\), 1 for the environment \(longest \d:\d\d\)", html)
    first, second = rows(html)
    assert first[0] == '<a href="/samples/run?trajectory=0">0</a>'
    assert (first[1], first[3:]) == ("environment", ["2", "4"])
    assert (second[1], second[3:]) == ("model", ["2", "2"])
    assert first[2].startswith("3:") and second[2][0] in "12"


def test_the_longest_waits_are_listed_and_all_are_counted(live) -> None:
    run, _, _ = live
    html = waiting(run)
    assert f"{GROUPS * GROUP_SIZE - 1} for the model" in html
    listed = rows(html)
    assert len(listed) == SHOWN_MAX
    assert {tuple(row[1:2] + row[3:]) for row in listed} == {("model", "1", "1")}


def test_a_trajectory_that_ended_a_moment_ago_is_not_listed(live) -> None:
    run, ledger, _ = live
    ended = make_group(0).members[0]
    ended.state, ended.reason = State.FAILED, "gone"
    ledger.update([ended])
    ledger.flush()
    assert all(">0<" not in row[0] for row in rows(waiting(run)))


def test_a_run_that_does_not_go_on_has_no_waits(live) -> None:
    run, ledger, _ = live
    assert waiting(run)
    ledger.close()
    assert waiting(run) == ""


@pytest.mark.usefixtures("live")
def test_a_listed_trajectory_has_a_page(tmp_path: Path) -> None:
    site = Site(tmp_path, "http://here/")
    page = site.run("run", {}).html
    (address,) = set(re.findall(r'href="(http://here/samples/run\?trajectory=2)"', page))
    assert address
    shown = site.samples("run", {"trajectory": ["0"]}).html
    assert "<small>trajectory 0</small>" in shown and shown.count("<article") == 1
    assert "There is none." in site.samples("run", {"trajectory": ["999"]}).html
