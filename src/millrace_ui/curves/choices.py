"""Which quantities of a run a page of curves shows, and how: the choices in its address. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from math import isfinite
from typing import Any
from urllib.parse import urlencode

from millrace_ui.drawing.charts import FAIRNESS, GAP, STALENESS, rates, waits
from millrace_ui.record.steps import Axis, Steps

SMOOTH_MAX = 0.999
NUMBER_DIGITS = 15


class Band(StrEnum):
    """What the band around the mean of a group shows."""

    RANGE = "range"  # the least and the largest of its runs
    DEVIATION = "deviation"  # mean minus and plus the standard deviation


@dataclass(frozen=True, slots=True)
class CurveChoices:
    """`smooth`: the weight of the past in an exponential moving average; 0: none. `first` and `last`: the
    range of versions; None: open. `group`: a key of the configuration whose equal values form one curve."""

    runs: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    by: Axis = Axis.STEP
    smooth: float = 0.0
    log: bool = False
    first: int | None = None
    last: int | None = None
    group: str = ""
    band: Band = Band.RANGE

    @classmethod
    def of(cls, query: Mapping[str, list[str]]) -> CurveChoices:
        """What makes no sense is left out. A range whose ends are the wrong way round is turned."""
        given = {name: (values or [""])[0] for name, values in query.items()}
        first, last = (_version(given.get(name, "")) for name in ("from", "to"))
        if first is not None and last is not None:
            first, last = sorted((first, last))
        by, band = given.get("by", ""), given.get("band", "")
        return cls(
            runs=tuple(dict.fromkeys(query.get("run", ()))),
            metrics=tuple(dict.fromkeys(query.get("metric", ()))),
            by=Axis(by) if by in list(Axis) else Axis.STEP,
            smooth=_weight(given.get("smooth", "")),
            log=bool(given.get("log")),
            first=first,
            last=last,
            group=given.get("group", ""),
            band=Band(band) if band in list(Band) else Band.RANGE,
        )

    def address(self, **changes: Any) -> str:
        """The query string of these choices with changes."""
        one = replace(self, **changes)
        pairs: list[tuple[str, Any]] = [("run", name) for name in one.runs]
        pairs += [("metric", name) for name in one.metrics]
        pairs += [("by", one.by.value)] * (one.by is not Axis.STEP)
        pairs += [("smooth", f"{one.smooth:g}")] * bool(one.smooth) + [("log", "1")] * one.log
        pairs += [(name, end) for name, end in (("from", one.first), ("to", one.last)) if end is not None]
        pairs += [("group", one.group)] * bool(one.group)
        pairs += [("band", one.band.value)] * (one.band is not Band.RANGE)
        return "?" + urlencode(pairs, errors="replace")


def _version(text: str) -> int | None:
    """A version; None: it is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= NUMBER_DIGITS else None


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        return 0.0
    return min(max(weight, 0.0), SMOOTH_MAX) if isfinite(weight) else 0.0


SPEED, WAITING = "time/trained_tokens_per_s", "time/wait_share"
MEASURED_BY_ITSELF = "wall_s"

_IMPORTANCE = "The importance weight: the probability of a token now, over that when it was sampled."

MEANINGS = {
    "reward/mean": "Mean over the trajectories of a step.",
    "trainer/reward_std": "Mean over the groups of a step of the standard deviation of their rewards.",
    "reward_metrics/*": "What the reward returned beside it. Mean over the trajectories that have it.",
    "trainer/kl_reference": "An estimate of the KL from the reference policy, in nats a token.",
    "trainer/kl_behavior": "An estimate of the KL from the policy that sampled, in nats.",
    "trainer/importance_mean": f"{_IMPORTANCE} Mean over the tokens.",
    "trainer/ess": "The share of the tokens that is left after they are weighted by importance.",
    "trainer/entropy": "Of the policy, in nats a token.",
    "trainer/lr": "The learning rate.",
    "trainer/loss": "Of the trainer.",
    "trainer/grad_norm": "The norm of the gradient before it is clipped.",
    "staleness/mean": STALENESS,
    "window/fairness": FAIRNESS,
    "logprob_gap/0/mean": GAP,
    SPEED: "Trained tokens per second of a step and the wait before it.",
    WAITING: "The share of its time in which the trainer waits for a batch.",
    "trainer/completion_tokens": "Tokens of a completion.",
    "trainer/truncated": "The share of the completions that a budget cut.",
    "trainer/groups_without_signal": "The share of the groups whose rewards are all equal.",
    "trainer/importance_capped": "The share of the tokens whose importance weight is above its cap.",
    "trainer/importance_*": _IMPORTANCE,
    "logprob_gap/*": GAP,
    "*staleness*": STALENESS,
}
"""What a metric means, by its name or a pattern. In this order metrics are offered, then the rest by name."""


def measured(runs: Iterable[Steps]) -> list[str]:
    """All metrics of any of the runs, in the order in which they are offered."""
    names = {name for steps in runs for name in steps.names() if name != MEASURED_BY_ITSELF}
    if "tokens/trained" in names and "time/step_s" in names:
        names |= {SPEED, WAITING}
    return sorted(names, key=lambda name: (_place(name), _parts(name)))


def column(steps: Steps, name: str) -> Sequence[float]:
    """One value a step."""
    computed = {SPEED: rates, WAITING: waits}.get(name)
    return computed(steps) if computed else steps.column(name)


def meaning(name: str) -> str:
    """Empty: its name says it."""
    return next((text for pattern, text in MEANINGS.items() if fnmatchcase(name, pattern)), "")


def _place(name: str) -> int:
    places = (i for i, pattern in enumerate(MEANINGS) if fnmatchcase(name, pattern))
    return next(places, len(MEANINGS))


def _parts(name: str) -> list[tuple[int, str]]:
    """So that 10 comes after 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]{1,9})", name)]
