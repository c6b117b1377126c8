"""Trajectories that have ended: no worker serves their requests, and an answer on its way leaves nothing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from millrace.controller.score_requests import FAILURES_MAX, ScoreRequests
from millrace.core.completion.columns import token_array
from millrace.core.types import Failed, Finish, Observed, ScoreRequest


@pytest.fixture
def worker():
    loop = asyncio.new_event_loop()
    yield SimpleNamespace(name="w", dead=loop.create_future())
    loop.close()


def request(trajectory_id):
    return ScoreRequest(trajectory_id, 0, token_array([1]), Finish.TURN, [(0, 1, True)], 9)


def test_a_request_that_waits_is_not_served(worker):
    requests = ScoreRequests(lanes=4)
    for trajectory_id in (1, 2):
        requests.put(request(trajectory_id))
    requests.forget({1})
    assert [one.trajectory_id for one in requests.take(worker)] == [2]


@pytest.mark.parametrize("end", ["given back", "lost with its worker"])
def test_a_request_under_way_does_not_wait_again(worker, end):
    requests = ScoreRequests(lanes=4)
    requests.put(request(1))
    taken = requests.take(worker)
    requests.forget({1})
    if end == "given back":
        requests.give_back("w", taken)
    else:
        requests.left("w")
    assert len(requests) == 0


def test_an_answer_that_nobody_waits_for_gives_the_trajectory_no_home(worker):
    requests = ScoreRequests(lanes=4)
    requests.put(request(1))
    requests.take(worker)
    requests.forget({1})
    requests.answered("w", 1, Observed(token_array([5])))
    requests.forget({1})
    assert 1 in requests.ended("w")
    other = SimpleNamespace(name="other", dead=worker.dead)
    requests.put(request(1))
    assert [one.trajectory_id for one in requests.take(other)] == [1]


def answered(requests, worker, trajectory_id):
    requests.put(request(trajectory_id))
    taken = requests.take(worker)
    requests.answered(worker.name, trajectory_id, Observed(token_array([5])))
    requests.give_back(worker.name, [])
    return [one.trajectory_id for one in taken]


def test_a_trajectory_that_begins_again_does_so_where_its_episode_is_closed_first(worker):
    requests, other = ScoreRequests(lanes=4), SimpleNamespace(name="other", dead=worker.dead)
    answered(requests, worker, 1)
    assert requests.restart(1) == "w"
    requests.put(request(1))
    assert requests.take(other) == [] and requests.ended("other") == []
    assert requests.ended("w") == [1]


def test_nobody_is_told_of_a_trajectory_that_begins_again_when_its_worker_is_lost(worker):
    """The episode is gone with the process, and another worker may have the trajectory by now."""
    requests = ScoreRequests(lanes=4)
    answered(requests, worker, 1)
    requests.restart(1)
    requests.left("w")
    assert requests.ended("other") == [] and requests.restart(1) == ""


def test_what_a_lost_worker_was_being_told_another_is_told(worker):
    requests = ScoreRequests(lanes=4)
    answered(requests, worker, 1)
    requests.forget([1])
    assert requests.ended("w") == [1]
    requests.left("w")
    assert requests.ended("other") == [1]
    requests.told("other")
    requests.left("other")
    assert requests.ended("third") == []


def test_the_worker_that_begins_a_forgotten_episode_is_told_of_it_and_its_failure_does_not_count(worker):
    requests = ScoreRequests(lanes=2 * FAILURES_MAX)
    for trajectory_id in range(2 * FAILURES_MAX):
        requests.put(request(trajectory_id))
        requests.take(worker)
        assert requests.forget([trajectory_id]) == {"w"}
    assert requests.ended("w") == [*range(2 * FAILURES_MAX)]
    for trajectory_id in range(2 * FAILURES_MAX):
        requests.answered("w", trajectory_id, Failed("it was ended"))
