"""Tables of `echo_chamber.py`: means over seeds with 95 % intervals, and whether the best format won."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from echo_formats import FORMATS, best, tilted
from stored_runs import plus_minus
from study import Result

Cell = tuple[str, str, float, float]
"""Mixture, scale, KL coefficient, learning rate."""
DOMINANT = 0.9
"""A format with at least this share of the samples is the only one that matters."""


def cells(runs: Iterable[Result]) -> dict[Cell, list[Result]]:
    """The runs of each cell, in the order in which cells first come."""
    found: dict[Cell, list[Result]] = {}
    for run in runs:
        found.setdefault((run["mixture"], run["scale"], run["kl"], run["lr"]), []).append(run)
    return found


def verdict(run: Result) -> dict[str, Any]:
    """What became of the formats of one run. `lead`: by how much the amplified one was more accurate at the
    start than the best of the others.

    `amplified`: the format with the largest share at the end, and that share. `predicted`: its share by
    `tilted`; None without a KL coefficient.
    """
    start, end = run["start"], run["end"]
    amplified = best(end["shares"])
    return {
        "amplified": amplified,
        "share": end["shares"][amplified],
        "dominant": end["shares"][amplified] >= DOMINANT,
        "lead": (start["accuracy"][amplified] or 0.0)
        - max(start["accuracy"][form] or 0.0 for form in FORMATS if form != amplified),
        "was_most_accurate": best(start["accuracy"]) == amplified,
        "was_most_frequent": best(start["shares"]) == amplified,
        "predicted": tilted(start, run["kl"])[amplified] if run["kl"] else None,
    }


def figures(runs: Sequence[Result]) -> dict[str, Any]:
    """Of all runs together."""
    verdicts = [verdict(run) for run in runs]
    free = [v for run, v in zip(runs, verdicts, strict=True) if not run["kl"]]
    return {
        "runs": len(runs),
        "seeds": len({run["seed"] for run in runs}),
        "dominant_without_kl": sum(v["dominant"] for v in free),
        "runs_without_kl": len(free),
        "amplified_was_most_accurate": sum(v["was_most_accurate"] for v in verdicts),
        "amplified_was_most_accurate_without_kl": sum(v["was_most_accurate"] for v in free),
        "amplified_was_most_frequent": sum(v["was_most_frequent"] for v in verdicts),
    }


def tables(runs: Sequence[Result]) -> str:
    """Three tables in Markdown."""
    by_cell = cells(runs)
    starts: dict[tuple[str, str], list[Result]] = {}
    for (mixture, scale, *_), each in by_cell.items():
        starts.setdefault((mixture, scale), each)
    return "\n\n".join([_starts(starts), _ends(by_cell), _verdicts(by_cell)])


def _starts(found: Mapping[tuple[str, str], list[Result]]) -> str:
    rows = [
        [
            f"{scale}, {mixture}",
            *(_over(runs, lambda r, f=form: r["start"]["shares"][f]) for form in FORMATS),
            *(_over(runs, lambda r, f=form: r["start"]["accuracy"][f]) for form in FORMATS),
        ]
        for (mixture, scale), runs in found.items()
    ]
    head = ["start model", *(f"share {f}" for f in FORMATS), *(f"right {f}" for f in FORMATS)]
    return _markdown(head, rows)


def _ends(found: Mapping[Cell, list[Result]]) -> str:
    rows = [
        [
            _named(cell),
            *(_over(runs, lambda r, f=form: r["end"]["shares"][f]) for form in FORMATS),
            *(_over(runs, lambda r, w=when: r[w]["entropy"]) for when in ("start", "end")),
            _over(runs, lambda run: verdict(run)["share"]),
            _over(runs, lambda run: verdict(run)["predicted"]),
        ]
        for cell, runs in found.items()
    ]
    head = ["after RL", *(f"share {f}" for f in FORMATS), "entropy before", "after"]
    return _markdown([*head, "amplified", "predicted"], rows)


def _verdicts(found: Mapping[Cell, list[Result]]) -> str:
    rows = [
        [
            _named(cell),
            ", ".join(verdict(run)["amplified"] for run in runs),
            _over(runs, lambda run: verdict(run)["lead"]),
            *(
                _over(runs, lambda r, w=when, n=name: r[w][n])
                for name in ("pass_1", "pass_k")
                for when in ("start", "end")
            ),
        ]
        for cell, runs in found.items()
    ]
    head = [
        "run",
        "amplified, by seed",
        "lead before",
        "pass@1 before",
        "after",
        "pass@16 before",
        "after",
    ]
    return _markdown(head, rows)


def _named(cell: Cell) -> str:
    mixture, scale, kl, lr = cell
    return f"{scale}, {mixture}, KL {kl:g}, lr {lr:g}"


def _over(runs: Sequence[Result], value: Callable[[Result], float | None]) -> str:
    """Of the seeds that have a value."""
    values = [number for run in runs if (number := value(run)) is not None]
    return plus_minus(values, 2).replace("+-", "±") if values else "-"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
