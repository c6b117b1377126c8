"""A finding of the doctor, and the keys that its advice may name: other keys would be refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from millrace.config.tables.algorithms import PRESETS, PolicyGradient
from millrace.diagnose.evidence import Evidence

SHOWN = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault: its name, its evidence, and advice."""

    fault: str
    evidence: tuple[str, ...]
    advice: tuple[str, ...]


def withdrawn(fault: str, first: int, last: int) -> str:
    """The text for a fault that a run had from version `first` to `last`, and has no more."""
    versions = f"for versions {first} to {last}" if last > first else f"at version {first}"
    return f"{fault} held {versions}; gone since"


def few(numbers: Sequence[int], noun: str) -> str:
    """`versions 3, 4, 5 and 7 more`."""
    shown = ", ".join(map(str, numbers[:SHOWN]))
    rest = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return f"{noun}{'s' if len(numbers) != 1 else ''} {shown}{rest}"


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


def bound_key(evidence: Evidence) -> str | None:
    return BOUND.get(evidence.schedule)


def ahead_key(evidence: Evidence) -> str | None:
    return AHEAD.get(evidence.schedule)


def tolerant(evidence: Evidence) -> Iterator[str]:
    """Settings by which the objective tolerates tokens of other policies."""
    if evidence.algorithm in CORRECTED and not evidence.corrects:
        yield "set `algorithm.correction` to 2.0: tokens of older policies then count by their importance"
    if evidence.algorithm in CORRECTED:
        yield 'an objective made for staleness tolerates more: `algorithm.kind = "aipo"`'
