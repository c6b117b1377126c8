"""Trajectories that have ended: no worker serves their requests, and an answer on its way leaves nothing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from millrace.controller.turns.score_requests import ScoreRequests
from millrace.core.completion.columns import token_array
from millrace.core.types import Finish, Observed, ScoreRequest


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
