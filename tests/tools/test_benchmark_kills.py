"""What `benchmarks/kills.py` says of a kill: whether it met a turn, and whether other tokens were trained."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import kills
import pytest
from kill_points import (
    MOMENT_MAX,
    SUITES,
    Kill,
    OpenTurns,
    PlayedRun,
    Verdict,
    kill_point,
    open_turns,
    untrue_steps,
)
from kill_points import foreign_tokens as foreign

from millrace.core.completion.columns import OBSERVED, TokenColumns
from millrace.core.events import Event
from millrace_chaos.attack import Attack
from millrace_chaos.child_run import ChildRun


def event(kind, wall_s, **fields):
    return Event(kind, wall_s, wall_s, fields)


def leased(wall_s, ids, replica):
    return event("leased", wall_s, trajectory_ids=ids, replica=replica, version=0, resumed_tokens=0)


LIFE = [
    leased(1.0, [0, 1], "replica-0"),
    leased(1.5, [2], "replica-1"),
    event("finished", 2.0, trajectory_id=0),
    event("worker_died", 3.0, name="replica-1"),
    event("observed", 4.0, trajectory_id=0),
    event("run_started", 5.0),
    leased(6.0, [0], "replica-1"),
    event("step", 7.0, version=1),
    event("finished", 8.0, trajectory_id=0),
    event("step", 9.0, version=1),
    event("scored", 10.0, trajectory_id=0),
]


@pytest.mark.parametrize(
    ("wall_s", "sampled", "waiting"),
    [
        (0.5, {}, set()),
        (1.9, {0: "replica-0", 1: "replica-0", 2: "replica-1"}, set()),
        (2.0, {1: "replica-0", 2: "replica-1"}, {0}),
        (3.0, {1: "replica-0"}, {0}),
        (4.0, {1: "replica-0"}, set()),
        (5.0, {}, set()),
        (6.5, {0: "replica-1"}, set()),
        (8.5, {}, {0}),
        (10.0, {}, set()),
    ],
)
def test_events_tell_which_turns_are_under_way(wall_s, sampled, waiting):
    turns = open_turns(LIFE, wall_s)
    assert (turns.sampled, turns.waiting, len(turns)) == (sampled, waiting, len(sampled) + len(waiting))


def test_events_of_turns_count_from_a_new_version_and_not_from_a_repeated_one():
    turns = OpenTurns()
    counts = [(turns(one), turns.version, turns.events)[1:] for one in LIFE]
    assert counts[6:] == [(0, 5), (1, 0), (1, 1), (1, 1), (1, 1)]


def columns(*stretches):
    made = TokenColumns()
    for tokens, version in stretches:
        for token in tokens:
            made.append(token, math.nan if version == OBSERVED else -0.5, version)
    return made


def test_tokens_that_differ_in_id_or_version_are_foreign_and_observed_ones_are_not():
    due = columns(([1, 2], 0), ([3], OBSERVED), ([4, 5], 0))
    assert foreign(columns(([1, 2], 0), ([3], OBSERVED), ([4, 5], 0)), due) == 0
    assert foreign(columns(([1, 9], 0), ([3], OBSERVED), ([4, 5], 0)), due) == 1
    assert foreign(columns(([1, 2], 0), ([3], OBSERVED), ([4, 5], 1)), due) == 2
    assert foreign(columns(([1, 2], 0), ([9], OBSERVED), ([4, 5], 0)), due) == 0
    assert foreign(columns(([1, 2], 0), ([3], OBSERVED), ([4, 5, 6], 0)), due) == 1
    assert foreign(due, None) == 4


def test_a_step_on_other_tokens_than_the_ledgers_is_told():
    columns_by_id = {0: columns(([1, 2], 0), ([3], OBSERVED))}

    def step(tokens, gap):
        return event("step", 1.0, version=1, trained_tokens=tokens, logprob_gap={"0": [0.0, gap, tokens]})

    assert untrue_steps([step(2, 1e-7), step(2, 1e-7)], columns_by_id) == []  # made again
    assert untrue_steps([step(3, 1e-7)], columns_by_id) == ["3 tokens trained, 2 in the ledger"]
    assert untrue_steps([step(2, 0.1)], columns_by_id) == ["log-probs differ by 0.1"]


def test_points_depend_on_the_seed_alone_and_meet_every_role_equally():
    made = [kill_point("agents", index, 3) for index in range(100)]
    assert made == [kill_point("agents", index, 3) for index in range(100)]
    assert made != [kill_point("agents", index, 4) for index in range(100)]
    assert [sum(one.role == role for one in made) for role in SUITES["agents"]] == [25] * 4
    assert all(1 <= one.moment <= MOMENT_MAX for one in made)
    assert all(1 <= one.earlier().moment <= one.moment or one.moment == 1 for one in made)


def test_the_file_goes_on_where_it_was_and_only_with_the_same_points(tmp_path):
    path, points = tmp_path / "kills.jsonl", [kill_point("turns", index, 0) for index in range(2)]
    results = kills.Results(path, {"seed": 0}, resume=False)
    kill = Kill(points[0], Attack("reward worker", "reward-worker-0", "kill", 0, 1.0), 0, met=2)
    results.add(kills.row_of(kill, kills.Verdict(True, False, 0, ["other weights"])))
    again = kills.Results(path, {"seed": 0}, resume=True)
    assert [again.has(point) for point in points] == [True, False] and again.rows == results.rows
    assert kills.summary(again.rows) == {
        "turns: environment worker": {
            **{"points": 1, "closed": 1, "equal": 0, "foreign_tokens": 0},
            **{"recovery_s": None, "until_step_s": None},
        }
    }
    with pytest.raises(SystemExit, match="already"):
        kills.Results(path, {"seed": 0}, resume=False)
    with pytest.raises(SystemExit, match="another --file"):
        kills.Results(path, {"seed": 1}, resume=True)


def test_a_line_that_a_kill_cut_off_is_made_again(tmp_path):
    path, points = tmp_path / "kills.jsonl", [kill_point("turns", index, 0) for index in range(2)]
    whole = [json.dumps({"seed": 0}), json.dumps({"suite": "turns", "index": 0})]
    path.write_text("\n".join([*whole, '{"suite": "tur']))
    results = kills.Results(path, {"seed": 0}, resume=True)
    assert [results.has(point) for point in points] == [True, False]
    results.add({"suite": "turns", "index": 1})
    assert kills.Results(path, {"seed": 0}, resume=True).rows == results.rows


class PlayedSuite:
    """In place of `Suite`: `outcomes`, one for each run, say which of its points were killed, and its
    problem."""

    outcomes = ()

    def __init__(self, name, directory, steps, deadline_s):
        self.directory, self.left, self.names = directory, list(self.outcomes), []
        directory.mkdir()

    def play(self, name, points, tell):
        path = self.directory / name
        path.mkdir()
        self.names.append(name)
        killed, problem = self.left.pop(0)
        made = [
            Kill(point, Attack(point.role, "one", "kill", 0, 1.0), 0, met=1)
            for point in points
            if point.index in killed
        ]
        run = SimpleNamespace(directory=SimpleNamespace(path=path))
        return SimpleNamespace(run=run, kills=made, problem=problem)

    def verdict(self, played):
        problems = [played.problem] if played.problem else []
        return Verdict(not problems, not problems, 0, problems)


def played_suite(outcomes):
    return type("Outcomes", (PlayedSuite,), {"outcomes": outcomes})


def end_of_main(monkeypatch, capsys, tmp_path, outcomes):
    """The exit code of `kills.py` with two points, its last line, and the directories that it keeps."""
    options = ["--points", "2", "--only", "turns", "--file", str(tmp_path / "kills.jsonl"), "--json"]
    monkeypatch.setattr(sys, "argv", ["kills.py", *options])
    monkeypatch.setattr(kills.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(kills, "Suite", played_suite(outcomes))
    monkeypatch.setattr(kills, "imported", mock.MagicMock(return_value=(mock.Mock(), mock.Mock())))
    monkeypatch.setattr(kills, "forked", lambda _: nullcontext())
    with pytest.raises(SystemExit) as ended:
        kills.main()
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    return ended.value.code, summary, [path.name for path in tmp_path.glob("millrace-kills-*")]


def test_runs_that_fail_before_their_first_kill_are_failures(monkeypatch, capsys, tmp_path):
    code, summary, kept = end_of_main(monkeypatch, capsys, tmp_path, [((), "exit code 1")] * 3)
    assert (code, summary["asked"], summary["points"]) == (1, 2, 0) and len(kept) == 1
    assert [one.partition(": ")[2] for one in summary["broken"]] == [
        *["exit code 1"] * 3,
        *["in no turn, 3 times"] * 2,
    ]
    assert all(kept[0] in one for one in summary["broken"][:3])


def test_a_point_that_meets_no_turn_is_a_failure(monkeypatch, capsys, tmp_path):
    outcomes = [((0,), ""), ((), ""), ((), "")]
    code, summary, kept = end_of_main(monkeypatch, capsys, tmp_path, outcomes)
    assert (code, summary["asked"], summary["points"]) == (1, 2, 1) and len(kept) == 1
    assert summary["broken"] == ["turns 1: in no turn, 3 times"]


def test_points_that_hold_leave_no_directory(monkeypatch, capsys, tmp_path):
    code, summary, kept = end_of_main(monkeypatch, capsys, tmp_path, [((0,), ""), ((1,), "")])
    assert (code, summary["asked"], summary["points"], summary["broken"], kept) == (0, 2, 2, [], [])


def test_a_refused_call_leaves_no_directory(monkeypatch, capsys, tmp_path):
    (tmp_path / "kills.jsonl").touch()
    monkeypatch.setattr(sys, "argv", ["kills.py", "--file", str(tmp_path / "kills.jsonl")])
    monkeypatch.setattr(kills.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SystemExit, match="already"):
        kills.main()
    assert not list(tmp_path.glob("millrace-kills-*"))


def test_the_name_of_a_run_of_many_points_is_short(tmp_path):
    points = [kill_point("turns", index, 0) for index in range(200)]
    suite = played_suite([(range(200), "")])("turns", tmp_path / "turns", 200, 1.0)
    results = kills.Results(tmp_path / "kills.jsonl", {}, resume=False)
    assert kills.play_all(suite, points, 200, results, kills.Progress(200)) == []
    assert suite.names == ["run-0-199-1"]


def running(**roles):
    """In place of a `ChildRun` that ends at once. `roles`: the pids of each."""
    return mock.Mock(
        pids=lambda role: roles.get(role, {}), poll=list, start=mock.Mock(), exit_code=0, events=[], version=0
    )


def test_files_of_an_earlier_run_tell_no_answer_under_way(tmp_path):
    (tmp_path / "busy-4242-1").touch()  # of a worker that was killed
    PlayedRun(running(), tmp_path, 1.0, has_agents=False).play([], lambda kill: None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("at_last", "met"), [({"agent-0": 7}, 1), ({}, 0)])
def test_an_agent_that_ends_just_before_its_kill_was_in_no_turn(tmp_path, at_last, met):
    point = next(one for index in range(9) if (one := kill_point("agents", index, 0)).role == "agent")
    run, kill = running(), []
    seen = [{"agent-0": 7}, {"agent-0": 7}]  # while it is waited for, and when it is chosen
    run.pids = lambda role: seen.pop(0) if seen else at_last
    run.exit_code, run.kill = None, lambda role, pid: []
    leases = iter([[leased(1.0, [0], "replica-0")] * point.moment])
    run.poll = lambda: next(leases, [])
    run.events = [leased(1.0, [0], "replica-0")]
    played = PlayedRun(run, tmp_path, 10.0, has_agents=True)
    played._kill_at(0, point, kill.append)
    assert [one.met for one in kill] == [met] and not seen


@contextmanager
def run_beside_a_process(tmp_path):
    run, process = ChildRun(tmp_path / "run.toml", tmp_path / "run"), subprocess.Popen(["sleep", "60"])
    run._controller = process
    try:
        yield run, process
    finally:
        process.kill()
        process.wait()


def test_a_process_that_has_the_number_of_a_dead_worker_is_left_alone(tmp_path):
    with run_beside_a_process(tmp_path) as (run, stranger):
        with mock.patch("millrace.runtime.process.stat_fields", return_value=["S", *["1"] * 30]):
            run._take_in(event("worker_started", 1.0, name="replica-0", role="replica", pid=stranger.pid))
        assert run.kill("replica", stranger.pid) == [] and run.pids("replica") == {}
        stranger.terminate()
        assert stranger.wait(60) == -signal.SIGTERM


def test_a_living_worker_is_killed(tmp_path):
    with run_beside_a_process(tmp_path) as (run, worker):
        run._take_in(event("worker_started", 1.0, name="replica-0", role="replica", pid=worker.pid))
        assert run.pids("replica") == {"replica-0": worker.pid}
        run.kill("replica", worker.pid)
        assert worker.wait(60) == -signal.SIGKILL
