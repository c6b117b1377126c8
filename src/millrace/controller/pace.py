"""How often a run's loops look. Real runs use the defaults; a large simulated cluster looks less often."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """`decision_s`: with several replicas, decisions wait this long after news, so that more of it collects.
    `flush_s`: between two writes to the ledger. `look_s`: after news the sessions of trainer and rewards wait
    this long before they look."""

    decision_s: float = 0.005
    flush_s: float = 0.2
    look_s: float = 0.0


PACE = Pace()
"""Of a real run."""
