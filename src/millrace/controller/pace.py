"""How often the loops of a run act. Small fleets use the defaults. Loops of a large fleet, real or simulated,
act less often."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.core import clock

REST = 8.0  # after a decision a loop rests this many times as long, within `REST_S_MAX`
REST_S_MAX = 0.1


@dataclass(frozen=True, slots=True)
class Pace:
    """`decision_s`: with several replicas, decisions wait this long after news, so that more news collects.
    `flush_s`: between two writes to the ledger. `look_s`: the sessions of the trainer and of reward workers
    wait this long after news, before they look for work."""

    decision_s: float = 0.005
    flush_s: float = 0.5
    look_s: float = 0.0


PACE = Pace()
"""Of a small fleet."""


def rest_s(began_s: float) -> float:
    """How long a loop rests after a decision that began at `began_s`: in large fleets a decision takes many
    milliseconds, and other coroutines wait."""
    return min(REST * (clock.now() - began_s), REST_S_MAX)
