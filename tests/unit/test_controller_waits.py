"""What counts as progress of a run, and what does not."""

from __future__ import annotations

import pytest

from millrace.controller.waits import Waits
from millrace.core import clock


@pytest.fixture
def now(monkeypatch):
    """A clock that a test sets."""
    seconds = [0.0]
    monkeypatch.setattr(clock, "now", lambda: seconds[0])
    return seconds


def test_weights_that_come_again_and_again_for_nothing_are_no_progress(now):
    waits = Waits()
    for now[0], version in ((1.0, 1), (2.0, 2), (3.0, 1), (4.0, 2)):
        waits.prepared("replica-0", f"version {version}")
    assert waits.progressed_s == 2.0


def test_after_real_progress_the_same_weights_count_again(now):
    waits = Waits()
    for now[0] in (1.0, 2.0):
        waits.prepared("replica-0", "version 1")
    now[0] = 3.0
    waits.progress("replica-0")
    now[0] = 4.0
    waits.prepared("replica-0", "version 1")
    assert waits.progressed_s == 4.0 and waits.fruitful("replica-0")


def test_a_wait_within_a_wait_of_the_same_worker_leaves_the_outer_one_told_and_bounded(now):
    waits = Waits()
    with waits.waiting("trainer", "its checkpoint", bounded=True):
        with waits.waiting("trainer", "a relay"):
            assert waits.describe() == [
                "trainer waits for its checkpoint (0.0 s)",
                "trainer waits for a relay (0.0 s)",
            ]
        assert waits.bounded and waits.describe() == ["trainer waits for its checkpoint (0.0 s)"]
    assert not waits.bounded and not waits.describe()
