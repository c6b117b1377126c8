"""Runs under attack, in real processes: a short version of `millrace chaos`."""

from __future__ import annotations

import os
import socket
from multiprocessing.shared_memory import SharedMemory

import pytest

from millrace.chaos.aftermath import check_remains, check_sockets, shared_memory
from millrace.chaos.attack import SUPERVISION
from millrace.chaos.trials import attack, kill_and_resume
from millrace.runtime import sockets

pytestmark = pytest.mark.usefixtures("warm")


def failed(checks):
    return [check for check in checks if not check.holds]


@pytest.mark.parametrize(("schedule", "seed"), [("synchronous", 1), ("laminar", 2)])
def test_a_run_under_attack_loses_nothing_and_leaves_nothing(schedule, seed, start, tmp_path):
    overrides = [f"schedule.kind={schedule}", "steps=12", *SUPERVISION]
    assert not failed(attack(start, tmp_path / "run", overrides, 6, seed)[0])


@pytest.mark.parametrize(
    ("schedule", "seed"), [(["schedule.kind=synchronous"], 3), (["schedule.kind=areal", "schedule.eta=1"], 4)]
)
def test_a_run_in_turns_is_attacked_at_its_hand_overs_and_loses_nothing(schedule, seed, start, tmp_path):
    """`millrace chaos` with `rollout.colocated=true` makes as many attacks as are wanted."""
    overrides = ["rollout.colocated=true", *schedule, "steps=12", *SUPERVISION]
    assert not failed(attack(start, tmp_path / "run", overrides, 8, seed)[0])


def test_a_run_killed_at_any_point_resumes_to_the_same_weights(start, tmp_path):
    assert not failed(kill_and_resume(start, tmp_path, [], 1, 3))


def test_a_memory_file_is_left_behind_when_no_living_process_uses_it():
    before = shared_memory()
    block = SharedMemory(create=True, size=64)
    try:
        assert all(check.holds for check in check_remains([], before))
        block.close()
        assert [check.holds for check in check_remains([], before)] == [True, False]
    finally:
        block.unlink()


def test_a_socket_of_the_run_would_have_been_found(tmp_path):
    assert check_sockets(set(), tmp_path).holds
    with socket.create_server(("127.0.0.1", 0)) as server:
        heard = sockets.listening([os.getpid()])
        assert heard == {f"tcp port {server.getsockname()[1]}"}
        assert not check_sockets(heard, tmp_path).holds
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / "socket"))
    assert not check_sockets(set(), tmp_path).holds
