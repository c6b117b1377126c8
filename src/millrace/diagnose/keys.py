"""Which keys of the schedule and the algorithm in use an advice may name. Other keys would be refused."""

from __future__ import annotations

from collections.abc import Iterator

from millrace.config.tables.algorithms import PRESETS, PolicyGradient
from millrace.diagnose.evidence import Evidence

BOUND = {
    "llamarl": "schedule.lag",
    "areal": "schedule.eta",
    "rlax": "schedule.acceptance_staleness",
    "laminar": "schedule.staleness_max",
    "millrace": "schedule.staleness_max",
    "rlboost": "schedule.staleness_max",
    "roll_flash": "schedule.alpha",
    "streamrl": "schedule.staleness_max",
    "staleflow": "schedule.staleness_max",
    "heddle": "schedule.staleness_max",
    "function": "schedule.staleness_max",
}
"""The key with the bound on staleness. `synchronous` and `rollpacker` have none."""

AHEAD = BOUND | {"millrace": "schedule.ahead"}
"""The key that says how far generation runs ahead."""

CORRECTED = tuple(kind for kind in PRESETS if PolicyGradient.default_of(kind, "anchor") == "proximal")
"""Kinds whose tokens count by an importance weight, `algorithm.correction`."""


def bound(evidence: Evidence) -> str | None:
    return BOUND.get(evidence.schedule)


def ahead(evidence: Evidence) -> str | None:
    return AHEAD.get(evidence.schedule)


def tolerant(evidence: Evidence) -> Iterator[str]:
    """Settings by which the objective tolerates tokens of other policies."""
    if evidence.algorithm in CORRECTED and not evidence.corrects:
        yield "set `algorithm.correction` to 2.0: tokens of older policies then count by their importance"
    if evidence.algorithm in CORRECTED:
        yield 'an objective made for staleness tolerates more: `algorithm.kind = "aipo"`'
