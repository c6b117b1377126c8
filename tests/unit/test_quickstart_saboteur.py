"""The quickstart kills a replica in the middle of trajectories, so that there is something to go on from."""

from __future__ import annotations

import os
import queue
import signal
from typing import Any

import pytest

from millrace.core.events import Event
from millrace.quickstart import saboteur as saboteur_module
from millrace.quickstart.saboteur import Saboteur


def test_a_replica_without_partial_tokens_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[signal.Signals] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    monkeypatch.setattr(saboteur_module, "_BEGUN_S", 3600.0)  # nothing is held up here
    saboteur, time_s = Saboteur(at_version=1), 0.0

    def tell(kind: str, *, later_s: float = 0.0, **fields: Any) -> None:
        nonlocal time_s
        time_s += later_s
        saboteur(Event(kind, time_s, 0.0, fields))

    tell("worker_started", name="replica-0", pid=7)
    tell("step", version=1)
    tell("leased", replica="replica-0", trajectory_ids=[1, 2], resumed_tokens=3)
    tell("report", replica="replica-0", running=1, generated_tokens=5)
    assert sent == [signal.SIGSTOP], "what it has sent is still to come"
    tell("finished", trajectory_id=1, tokens=8)
    tell("scored", later_s=1.0)
    assert sent == [signal.SIGSTOP, signal.SIGCONT], "all that was generated has finished"
    sent.clear()
    tell("report", replica="replica-0", running=2, generated_tokens=6)
    tell("scored", later_s=1.0)
    assert sent == [signal.SIGSTOP, signal.SIGKILL] and saboteur.victim == "replica-0"


def test_a_replica_is_held_up_in_the_middle_of_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a fast one tells of its work only when all of it has finished."""
    sent: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.put(number))
    saboteur = Saboteur(at_version=1)
    for kind, fields in (
        ("worker_started", {"name": "replica-0", "pid": 7}),
        ("step", {"version": 1}),
        ("leased", {"replica": "replica-0", "trajectory_ids": [1], "resumed_tokens": 0}),
    ):
        saboteur(Event(kind, 0.0, 0.0, fields))
    assert [sent.get(timeout=60) for _ in range(2)] == [signal.SIGSTOP, signal.SIGCONT]
