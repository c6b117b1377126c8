"""The quickstart kills a replica in the middle of trajectories, so that there is something to go on from."""

from __future__ import annotations

import os
from typing import Any

import pytest

from millrace.core.events import Event
from millrace.quickstart.saboteur import Saboteur


def test_a_replica_without_partial_tokens_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, signal: killed.append(pid))
    saboteur = Saboteur(at_version=1)

    def tell(kind: str, **fields: Any) -> None:
        saboteur(Event(kind, 1.0, 0.0, fields))

    tell("worker_started", name="replica-0", pid=7)
    tell("step", version=1)
    tell("leased", replica="replica-0", trajectory_ids=[1, 2], resumed_tokens=3)
    tell("report", replica="replica-0", running=1, generated_tokens=5)
    tell("finished", trajectory_id=1, tokens=8)
    tell("leased", replica="replica-0", trajectory_ids=[3], resumed_tokens=0)
    assert not killed, "all that was generated has finished"
    tell("report", replica="replica-0", running=2, generated_tokens=6)
    tell("leased", replica="replica-1", trajectory_ids=[2], resumed_tokens=1)
    assert killed == [7] and saboteur.victim == "replica-0"
