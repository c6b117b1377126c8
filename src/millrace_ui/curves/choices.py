"""What a page of curves shows and how: the choices in its address. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isfinite
from typing import Any
from urllib.parse import urlencode

from millrace_ui.record.steps import Axis

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
