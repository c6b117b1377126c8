"""The costs of a real run's replicas, from their reports."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from millrace.core.errors import DataError
from millrace.core.events import Event

NUM_INTERVALS_MIN = 20
NUM_TURNS = 5

Period = tuple[float, float]
"""Start and end, in seconds."""


@dataclass(frozen=True, slots=True)
class ReportInterval:
    """The time between two consecutive reports of one incarnation of a replica."""

    span: Period
    steps: int | None  # decode steps; None: unknown, because of a swap
    tokens: int
    prefilled: int
    busy_s: float
    idle_s: float
    had_work: bool  # at its beginning


def intervals(events: Sequence[Event]) -> list[ReportInterval]:
    return list(_intervals(events))


def _intervals(events: Sequence[Event]) -> Iterator[ReportInterval]:
    last: dict[str, Event] = {}
    for event in events:
        if event.kind != "report" or "steps_since_swap" not in event.fields:
            continue
        now, earlier = event.fields, last.get(event.fields["replica"])
        last[now["replica"]] = event
        if earlier is None or earlier.fields["version"] < 0 or now["busy_s"] < earlier.fields["busy_s"]:
            continue
        before = earlier.fields
        swapped = now["version"] != before["version"] or now["steps_since_swap"] < before["steps_since_swap"]
        yield ReportInterval(
            (earlier.time_s, event.time_s),
            steps=None if swapped else now["steps_since_swap"] - before["steps_since_swap"],
            tokens=now["generated_tokens"] - before["generated_tokens"],
            prefilled=now["prefilled_tokens"] - before["prefilled_tokens"],
            busy_s=now["busy_s"] - before["busy_s"],
            idle_s=now["idle_s"] - before["idle_s"],
            had_work=before["running"] > 0,
        )


def decode_costs(
    events: Sequence[Event], check: Callable[[], None] = lambda: None
) -> tuple[float, float, float, float]:
    """Seconds of a decode step, of a token in a step, and of a prefilled token, while the trainer waits; and
    the factor by which the three grow while the trainer computes, because few cores are shared.

    The three are fitted to reports with a known number of steps, the factor to all reports, in turns. `check`
    is called before each turn, and may raise.

    Raises: DataError: the run generated too little, or its reports lack the counters.
    """
    measured, spans = [s for s in intervals(events) if s.tokens > 0], training_spans(events)
    known = [(s.steps, s) for s in measured if s.steps]
    if len(known) < NUM_INTERVALS_MIN:
        raise DataError(
            f"{len(known)} reports tell of decode steps: {NUM_INTERVALS_MIN} are the least to fit their time"
        )
    overlap = {s.span: _share(s.span, spans) for s in measured}
    steps_per_token = sum(steps for steps, _ in known) / sum(s.tokens for _, s in known)
    contention = 1.0
    for _ in range(NUM_TURNS):
        check()
        slower = {span: 1.0 + (contention - 1.0) * share for span, share in overlap.items()}
        step_s, token_s, prefill_s = fit(
            [[slower[s.span] * count for count in (steps, s.tokens, s.prefilled)] for steps, s in known],
            [s.busy_s for _, s in known],
        )
        alone_s = [
            s.tokens * (step_s * steps_per_token + token_s) + s.prefilled * prefill_s for s in measured
        ]
        shares = [
            (e * (1.0 - overlap[s.span]), e * overlap[s.span]) for e, s in zip(alone_s, measured, strict=True)
        ]
        alone, together = fit(shares, [s.busy_s for s in measured])
        alone = alone or together
        contention = max(1.0, together / alone)
    return step_s * alone, token_s * alone, prefill_s * alone, contention


def training_spans(events: Sequence[Event]) -> list[Period]:
    """The periods in which the trainer computed."""
    return [
        (e.time_s - e.fields["step_s"], e.time_s)
        for e in events
        if e.kind == "step" and not e.fields["replayed"]
    ]


def _share(span: Period, of: Sequence[Period]) -> float:
    """The part of `span` that lies within spans that follow each other."""
    begin, end = span
    first = max(0, bisect_right(of, (begin, begin)) - 1)
    inside = 0.0
    for low, high in of[first:]:
        if low >= end:
            break
        inside += max(0.0, min(end, high) - max(begin, low))
    return inside / (end - begin) if end > begin else 0.0


def handover_s(events: Sequence[Event], call_s: float) -> float:
    """Mean seconds to begin work and report it.

    Measured from a lease of an idle replica to the report of that work, without the busy seconds and the
    seconds of the two messages, `call_s`. Or, if that is more, the idle seconds between two reports of a
    replica with work."""
    had_work = [s.idle_s for s in intervals(events) if s.had_work and s.steps is not None]
    return max(0.0, mean(list(_round_trips(events))) - call_s, mean(had_work))


def _round_trips(events: Sequence[Event]) -> Iterator[float]:
    idle: dict[str, float] = {}  # replicas with nothing to do -> their busy seconds so far
    sent: dict[str, float] = {}  # idle replicas that got one message of work -> when
    for event in events:
        name, now = event.fields.get("replica", ""), event.fields
        if event.kind == "leased" and name in idle and name not in sent:
            sent[name] = event.time_s
        elif event.kind in ("leased", "pulled"):
            sent.pop(name, None)
            idle.pop(name, None)
        elif event.kind == "report" and now["busy_s"] != idle.get(name):
            done = not now["running"] and not now["waiting"]
            if name in sent and done:
                yield event.time_s - sent[name] - (now["busy_s"] - idle[name])
            sent.pop(name, None)
            idle.pop(name, None)
            if done:
                idle[name] = now["busy_s"]


def mean(values: Sequence[float]) -> float:
    """The mean; 0 of no values."""
    return fmean(values) if values else 0.0


Row = Sequence[float]


def fit(rows: Sequence[Row], targets: Sequence[float]) -> list[float]:
    """Coefficients c >= 0 with sum_i (rows_i . c - targets_i)^2 about as small as can be.

    Solves the normal equations. While a coefficient is negative, the most negative coefficient is fixed at 0
    and the others are solved again. A column of zeros gets 0.

    Shapes:
        rows     (N, K), targets (N,); returns (K,)
    """
    width = len(rows[0]) if rows else 0
    active = [k for k in range(width) if any(row[k] for row in rows)]
    while active:
        solution = _solve(rows, targets, active)
        if solution is None:
            active.pop()
            continue
        worst = min(range(len(active)), key=lambda i: solution[i])
        if solution[worst] >= 0:
            return [dict(zip(active, solution, strict=True)).get(k, 0.0) for k in range(width)]
        active.pop(worst)
    return [0.0] * width


def _solve(rows: Sequence[Row], targets: Sequence[float], columns: list[int]) -> list[float] | None:
    """Gaussian elimination with pivoting; None if the columns are linearly dependent."""
    size = len(columns)
    scale = [max(abs(row[k]) for row in rows) for k in columns]
    scaled = [[row[k] / scale[i] for i, k in enumerate(columns)] for row in rows]
    table = [
        [sum(row[i] * row[j] for row in scaled) for j in range(size)]
        + [sum(row[i] * target for row, target in zip(scaled, targets, strict=True))]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(table[r][i]))
        table[i], table[pivot] = table[pivot], table[i]
        if abs(table[i][i]) < 1e-9 * len(rows):
            return None
        for r in range(size):
            if r != i:
                factor = table[r][i] / table[i][i]
                table[r] = [a - factor * b for a, b in zip(table[r], table[i], strict=True)]
    return [table[i][size] / table[i][i] / scale[i] for i in range(size)]
