"""A turn goes on where the one before was sampled, if that replica has room."""

from __future__ import annotations

import pytest
from test_schedule_decisions import AREAL, LAMINAR, replica, view

from millrace.schedule import QueuedView

BOTH = view(replica("a", running=5), replica("b"))


@pytest.mark.parametrize("schedule", [AREAL, LAMINAR])
def test_a_turn_that_comes_back_goes_home_and_others_to_the_least_load(schedule) -> None:
    queued = [QueuedView(None, 3), QueuedView(None, 3, "a"), QueuedView(3, 3)]
    assert schedule.place(BOTH, queued) == ["b", "a", "b"]


def test_homes_fill_up_and_the_rest_goes_elsewhere() -> None:
    assert AREAL.place(BOTH, [QueuedView(None, 3, "a")] * 5) == ["a", "a", "a", "b", "b"]


@pytest.mark.parametrize(
    "home",
    [replica("a", running=8), replica("a", busy=True), replica("c", running=7)],
    ids=["full", "busy", "dead"],
)
def test_no_turn_waits_for_its_home(home) -> None:
    look = view(replica("b", running=6), home)
    assert AREAL.place(look, [QueuedView(None, 3, "a")]) == ["b"]


def test_a_home_that_is_behind_gives_way_to_newer_weights_with_a_free_slot() -> None:
    queued = [QueuedView(None, 2, "a")]
    assert AREAL.place(view(replica("a", 2), replica("b", 3, running=4)), queued) == ["b"]
    assert AREAL.place(view(replica("a", 2), replica("b", 3, running=8)), queued) == ["a"]
    assert AREAL.place(view(replica("a", 2, running=4), replica("b", 2)), queued) == ["a"]


def test_a_home_that_has_the_newest_of_its_host_keeps_its_turns() -> None:
    look = view(replica("a", 2, pullable=(1, 2)), replica("b", 3, running=4))
    assert AREAL.place(look, [QueuedView(None, 2, "a")]) == ["a"]


def test_a_home_that_has_taken_other_weights_is_a_replica_like_any_other() -> None:
    look = view(replica("a", running=7), replica("b", running=6))
    assert AREAL.place(look, [QueuedView(None, 2, "a")]) == ["b"]
