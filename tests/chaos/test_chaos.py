"""Runs under attack, in real processes: a short version of `millrace chaos`."""

from __future__ import annotations

import os
import socket
from importlib.util import find_spec
from multiprocessing.shared_memory import SharedMemory
from threading import Timer

import pytest
from kill_points import SUITES, Suite, Verdict, kill_point
from tests import turn_runs
from tests.long import few, long

from millrace.runtime import process
from millrace_chaos import aftermath
from millrace_chaos.aftermath import check_remains, check_sockets, shared_memory
from millrace_chaos.attack import SUPERVISION
from millrace_chaos.trials import attack, kill_and_resume, preempt

pytestmark = pytest.mark.usefixtures("warm")
ACTORS = SUITES["turns"]
DEADLINE_S = 100.0


def failed(checks):
    return [check for check in checks if not check.holds]


@pytest.mark.parametrize(("schedule", "seed"), few([("laminar", 2), ("synchronous", 1)]))
def test_a_run_under_attack_loses_nothing_and_leaves_nothing(schedule, seed, start, tmp_path):
    overrides = [f"schedule.kind={schedule}", "steps=12", *SUPERVISION]
    assert not failed(attack(start, tmp_path / "run", overrides, 6, seed)[0])


@long
@pytest.mark.parametrize(
    ("schedule", "seed"), [(["schedule.kind=synchronous"], 3), (["schedule.kind=areal", "schedule.eta=1"], 4)]
)
def test_a_run_in_turns_is_attacked_at_its_hand_overs_and_loses_nothing(schedule, seed, start, tmp_path):
    """`millrace chaos` with `rollout.colocated=true` makes as many attacks as are wanted."""
    overrides = ["rollout.colocated=true", *schedule, "steps=12", *SUPERVISION]
    assert not failed(attack(start, tmp_path / "run", overrides, 8, seed)[0])


@long
def test_episodes_of_several_turns_are_attacked_and_none_is_lost(tmp_path):
    overrides = ["schedule.kind=areal", "schedule.eta=1", "steps=12", *SUPERVISION]
    assert not failed(attack(turn_runs.make_start(tmp_path), tmp_path / "run", overrides, 6, 5)[0])


@long
def test_a_run_killed_in_the_turns_of_its_steps_ends_with_the_same_weights(tmp_path):
    """At most once in each step: on a busy machine a step may end before its moment. `python
    benchmarks/kills.py` tries such a point again."""
    suite = Suite("turns", tmp_path / "turns", 3, DEADLINE_S)
    points = [kill_point("turns", index, 0) for index in range(3)]
    played = suite.play("run", points)
    roles = {(kill.point.role, kill.version) for kill in played.kills}
    assert roles and roles <= {*zip(ACTORS, range(3), strict=True)}
    assert any(kill.met for kill in played.kills)
    verdict = suite.verdict(played)
    assert verdict == Verdict(closed=True, equal=True, foreign_tokens=0, problems=[])


@long
def test_a_run_of_agents_killed_in_their_turns_ends_with_the_same_weights(tmp_path):
    """The gateways, the agents, the replicas and the controller."""
    config = turn_runs.make_agent_start(tmp_path)
    checks = kill_and_resume(config, tmp_path, ["steps=4"], 3, 1, print)
    print(checks[0].detail)
    assert not failed(checks)


WITHOUT_JAX = pytest.mark.skipif(find_spec("jax") is None, reason="needs JAX: make test-jax")


@long
@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=WITHOUT_JAX)])
def test_a_run_killed_at_any_point_resumes_to_the_same_weights(backend, start, tmp_path):
    assert not failed(kill_and_resume(start, tmp_path, [f"trainer.backend={backend}"], 1, 3))


@long
@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=WITHOUT_JAX)])
def test_a_run_that_is_preempted_again_and_again_ends_with_the_same_weights(backend, start, tmp_path):
    overrides = [f"trainer.backend={backend}", "steps=6"]
    assert not failed(preempt(start, tmp_path, overrides, 3, 6))


def test_a_memory_file_is_left_behind_when_no_living_process_uses_it(monkeypatch):
    monkeypatch.setattr(aftermath, "GONE_S", 1.0)
    before = shared_memory()
    block = SharedMemory(create=True, size=64)
    try:
        assert all(check.holds for check in check_remains([], before))
        block.close()
        assert [check.holds for check in check_remains([], before)] == [True, False]
    finally:
        block.unlink()


def test_a_memory_file_of_a_process_that_ends_is_not_left_behind():
    before = shared_memory()
    block = SharedMemory(create=True, size=64)
    block.close()
    timer = Timer(0.2, block.unlink)
    timer.start()
    assert all(check.holds for check in check_remains([], before))
    timer.join()


def test_a_socket_of_the_run_would_have_been_found(tmp_path):
    assert check_sockets(set(), tmp_path).holds
    before = process.listening([os.getpid()])  # other tests of this process may have servers
    with socket.create_server(("127.0.0.1", 0)) as server:
        heard = process.listening([os.getpid()]) - before
        assert heard == {f"tcp port {server.getsockname()[1]}"}
        assert not check_sockets(heard, tmp_path).holds
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / "socket"))
    assert not check_sockets(set(), tmp_path).holds
