"""Tables and plots of the study of staleness, from finished runs alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
import study
from staleness_costs import Cost, Outcome, cost, final
from staleness_design import CORRECTIONS, NONE, SIZES, arms, chosen_rate, rate_runs
from staleness_results import StalenessResults
from stored_runs import interval

from millrace_ui.curves.curve_lines import Line

BEGIN, END = "<!-- studies/staleness.py -->\n", "<!-- end -->\n"
NO_CORRECTION = "no correction"
Costs = dict[tuple[str, int], Cost]
Outcomes = Mapping[tuple[str, int], Mapping[int, Outcome]]
"""(correction, staleness) -> seed -> what is known of the run."""


def outcomes(results: StalenessResults, size: str) -> Outcomes:
    """Of the runs at the chosen learning rate."""
    rate = chosen_rate(size, results.rewards)
    kept: dict[tuple[str, int], dict[int, Outcome]] = {arm: {} for arm in arms(size, list(CORRECTIONS))}
    tried = set(rate_runs(size))
    for run in sorted(results.runs, key=lambda run: run.seed):
        if run.size == size and run.rate == rate and run not in tried:
            kept[run.correction, run.staleness][run.seed] = results.outcome(run)
    return {arm: runs for arm, runs in kept.items() if runs}


def costs(kept: Outcomes, size: str) -> Costs:
    """Of each arm, over the seeds that also have a run at staleness 0."""
    base = kept.get((NONE, 0), {})
    pairs = {
        arm: [(one, base[seed]) for seed, one in runs.items() if seed in base] for arm, runs in kept.items()
    }
    return {arm: cost(own, SIZES[size].every) for arm, own in pairs.items() if own}


def tables(results: StalenessResults) -> list[str]:
    """Markdown: of each size its learning rates, staleness without correction, and the corrections."""
    lines = []
    for size in SIZES:
        kept = outcomes(results, size)
        found = costs(kept, size)
        lines += _rates(results, size)
        if found:
            lines += _staleness(found, kept, size) + _corrections(found, size)
    return lines


def _rates(results: StalenessResults, size: str) -> list[str]:
    rewards, chosen = results.rewards, chosen_rate(size, results.rewards)
    means = {}
    for rate in SIZES[size].rates:
        own = [rewards[run] for run in rate_runs(size) if run.rate == rate and run in rewards]
        if own:
            means[f"{rate:g}" + (" (chosen)" if rate == chosen else "")] = sum(map(fmean, own)) / len(own)
    row = ["mean held-out reward of the whole run", *(f"{mean:.3f}" for mean in means.values())]
    return _table([f"{size}, staleness 0: learning rate", *means], [row]) if means else []


def _staleness(found: Costs, kept: Outcomes, size: str) -> list[str]:
    rows = [
        [
            str(staleness),
            str(one.seeds),
            "-" if staleness == 0 else _most(one, one.extra, 0),
            "-" if staleness == 0 else _most(one, one.percent, 0),
            written(interval([final(run.rewards) for run in kept[NONE, staleness].values()]), 3),
            "-" if staleness == 0 else written(one.below, 3),
            written(interval([run.greedy for run in kept[NONE, staleness].values()]), 2),
            str(one.collapsed),
        ]
        for staleness in SIZES[size].staleness
        if (one := found.get((NONE, staleness)))
    ]
    head = ["seeds", "more steps", "%", "final reward", "below staleness 0", "greedy", "collapsed"]
    return _table([f"{size}, no correction: staleness", *head], rows)


def _corrections(found: Costs, size: str) -> list[str]:
    rows, corrected = [], SIZES[size].corrected
    for name in CORRECTIONS:
        own = [found.get((name, staleness)) for staleness in corrected]
        if any(own):
            rows.append([f"`{name}`" if name != NONE else name])
            for one in own:
                rows[-1] += (
                    ["", "", ""]
                    if one is None
                    else [
                        _most(one, one.percent, 0),
                        written(one.below, 3),
                        f"{one.collapsed} of {one.seeds}",
                    ]
                )
    head = [
        f"{staleness}: {what}" for staleness in corrected for what in ("% more steps", "below", "collapsed")
    ]
    return _table([f"{size}: correction", *head], rows) if rows else []


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


def written(pair: tuple[float, float | None], digits: int) -> str:
    mean, half = pair
    return f"{mean:.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")


def _most(one: Cost, pair: tuple[float, float | None], digits: int) -> str:
    """Where a seed never reaches the target, the mean is at least so much, and its interval says nothing."""
    if one.missed:
        return f"at least {pair[0]:.{digits}f} ({one.missed} of {one.seeds} never)"
    return written(pair, digits)


def figures(results: StalenessResults) -> dict[str, float | None]:
    named: dict[str, float | None] = {"runs": len(results.runs)}
    named["cpu_hours"] = sum(summary["cpu_s"] for summary in results.runs.values()) / 3600
    for size in SIZES:
        for (name, staleness), one in costs(outcomes(results, size), size).items():
            if staleness:
                named[f"{size} {name} {staleness} percent"] = one.percent[0]
                named[f"{size} {name} {staleness} below"] = one.below[0]
    return named


# ---------------------------------------------------------------- plots and the page


def plots(results: StalenessResults, directory: Path) -> list[str]:
    """Of each size: rewards by step, and the steps that staleness costs. Returns the images in Markdown: a
    paragraph for each size."""
    shown: list[str] = []
    for size in SIZES:
        kept = outcomes(results, size)
        found = costs(kept, size)
        lines = [
            _curve(f"staleness {staleness}", kept[NONE, staleness].values(), SIZES[size].every)
            for staleness in SIZES[size].staleness
            if (NONE, staleness) in kept
        ]
        more = [line for name in CORRECTIONS if (line := _percent(name, found))]
        steps, most = float(SIZES[size].steps), float(SIZES[size].staleness[-1])
        if shown and lines:
            shown.append("")
        for name, title, drawn, end, x_label in (
            ("rewards", "no correction: mean held-out reward", lines, steps, "optimizer steps"),
            ("costs", "% more steps to the same reward", more, most, "staleness"),
        ):
            if drawn:
                file = directory / f"staleness-{name}-{size}.svg"
                study.save_chart(file, f"{size}, {title}", drawn, (0.0, end), x_label=x_label)
                shown.append(f"![{size}, {title}, by {x_label}](../docs/images/{file.name})")
    return shown


def _curve(label: str, runs: Iterable[Outcome], every: int) -> Line:
    rewards = np.mean([run.rewards for run in runs], axis=0)
    return Line(label, np.arange(len(rewards), dtype=float) * every, rewards)


def _percent(name: str, found: Costs) -> Line | None:
    """With its interval for no correction, if there are three seeds: that of two is wider than the chart."""
    own = sorted((staleness, one) for (arm, staleness), one in found.items() if arm == name and staleness)
    if not own:
        return None
    x = np.array([0.0, *(float(staleness) for staleness, _ in own)])
    means = np.array([0.0, *(one.percent[0] for _, one in own)])
    if name != NONE or any(one.seeds < 3 for _, one in own):
        return Line(NO_CORRECTION if name == NONE else name, x, means, dots=True)
    halves = np.array([0.0, *(one.percent[1] or 0.0 for _, one in own)])
    return Line(f"{NO_CORRECTION}, 95 %", x, means, low=means - halves, high=means + halves, dots=True)


def write_page(document: Path, lines: Sequence[str]) -> None:
    """Put the tables into the page, in place of those that are there."""
    before, _, rest = document.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    text = before + BEGIN + "".join(f"{line}\n" for line in lines) + END + after
    document.write_text(text, encoding="utf-8")
