"""A simulated run, or a comparison of several, as one HTML file that looks like the report of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from millrace_sim.compare import Comparison, verdict
from millrace_sim.costs.cluster import ClusterCosts
from millrace_sim.measure import Timeline
from millrace_sim.simulation import Scenario
from millrace_ui import page
from millrace_ui.curves.chart import across, line_of, with_legend
from millrace_ui.drawing import bars, fragments
from millrace_ui.overview import TIMELINE
from millrace_ui.record.steps import Curve
from millrace_ui.record.story import Activity, TimelineBar, row_order

POINTS = 200
"""Points of a curve over time."""
LANES_MAX, SPANS_MAX = 8, 2500
"""Replicas on the timeline of each schedule, and spans of all timelines. The file stays under 2 MB."""
HEAD = (
    "schedule",
    "step (s)",
    "trained tokens/s",
    "trainer busy",
    "replicas busy",
    "KV memory used",
    "mean staleness (versions)",
    "largest",
    "fairness",
)

_ESTIMATES = (
    ("Speed", "Trained tokens per second.", "trained_tokens_per_s", "tokens/s"),
    ("Time of a step", "From one optimizer step to the next.", "step_s", "seconds"),
    (
        "Fairness",
        "Of the batches. 1: random choices of groups; above 1: short completions are trained together, and "
        "long ones.",
        "fairness",
        "",
    ),
)
_SHARES = "Means over seeds. Green is work, grey is waiting, magenta the rest: weights that are published."
_INTERVAL = "The line is the 95 % confidence interval over seeds."
_CURVES = (
    ("KV cache", "Share of the replicas' KV memory in use, from 0 to 1 (first seed).", "kv", False),
    ("Trajectories running", "In all replicas together (first seed).", "running", True),
)


def simulated(
    title: str, base: Scenario, compared: Sequence[Comparison], rows: Sequence[Sequence[str]]
) -> str:
    """`compared` has the results of `base` by schedule and seed. `rows` are the terminal's table."""
    drawn = "".join([*_figures(compared), *_over_time(compared), *_timelines(compared)])
    said = "".join(f"<p>{fragments.quoted(sentence)}</p>" for sentence in verdict(compared))
    head = f"<h1>{fragments.safe(title)}</h1><p>{fragments.safe(_about(base))}</p>"
    facts, table = fragments.facts(_facts(base, compared)), fragments.table(HEAD, rows)
    return page.whole_file(title, f'{head}{facts}{said}{table}<div class="charts">{drawn}</div>')


def _about(base: Scenario) -> str:
    """The simulated scenario in words."""
    costs = base.costs
    where = str(costs.cluster) if isinstance(costs, ClusterCosts) else "roles as fast as those of a real run"
    for other in base.others:
        if isinstance(other.costs, ClusterCosts):
            generation = other.costs.cluster.generation
            where += f", and {other.num} replicas of {generation.tensor_parallel} {generation.device.name}"
    return (
        f"The real controller ran in virtual time. It led {where}. "
        "No model ran: every duration comes from a model of its cost."
    )


def _facts(base: Scenario, compared: Sequence[Comparison]) -> dict[str, object]:
    config, unit = base.config, base.workload.quantum
    least, most = base.workload.prompt_tokens
    return {
        "optimizer steps": config.steps,
        "seeds of each schedule": len(compared[0].results),
        "prompts a step": config.batch.prompts,
        "trajectories a prompt": config.batch.group_size,
        "tokens of a prompt": f"{least:,} to {most:,}",
        "tokens of a completion, at most": config.sampling.max_tokens * unit,
        "replicas": config.rollout.replicas,
        "trajectories at once in a replica": config.rollout.slots,
    }


def _figures(compared: Sequence[Comparison]) -> Iterator[str]:
    for heading, explanation, quantity, unit in _ESTIMATES:
        known = {one.name: interval for one in compared if (interval := one.known(quantity))}
        if known:
            means = {name: interval.mean for name, interval in known.items()}
            halves = {name: interval.half_width for name, interval in known.items()}
            yield fragments.card(heading, f"{explanation} {_INTERVAL}", bars.bars(means, unit, halves))
    shares = {f"{one.name}, {who}": took for one in compared for who, took in _shares(one).items()}
    times = bars.time_bars(shares, bars.SHARE_COLORS, unit="")
    yield fragments.card("Where the time went", _SHARES, times, whole=True)
    staleness = {one.name: one.results[0].staleness for one in compared}
    curves = {name: Curve([*map(float, of)], [*of.values()]) for name, of in staleness.items()}
    caption = "Share of trained tokens, from 0 to 1, by their staleness (first seed)."
    yield _lines("Staleness", caption, curves, "versions")


def _lines(heading: str, explanation: str, curves: Mapping[str, Curve], x_label: str) -> str:
    lines = [line_of(label, curve) for label, curve in curves.items()]
    drawn = with_legend(heading, lines, across(lines), x_label=x_label)
    return fragments.card(heading, explanation, drawn)


def _shares(one: Comparison) -> dict[str, dict[str, float]]:
    """The shares of the time of the trainer, of the replicas, and of episodes with an environment."""
    steps, waits, busy = (
        one.estimate(quantity).mean for quantity in ("trainer_busy", "trainer_waits", "replica_busy")
    )
    rest = max(0.0, 1.0 - steps - waits)
    episodes = one.known("episode_waits")
    acting = episodes and {"decoding": 1.0 - episodes.mean, "waiting for answers": episodes.mean}
    return {
        "trainer": {"optimizer steps": steps, "waiting for a batch": waits, "publishing weights": rest},
        "replicas": {"decoding": busy, "idle": 1.0 - busy},
        **({"episodes": acting} if acting else {}),
    }


def _over_time(compared: Sequence[Comparison]) -> Iterator[str]:
    for heading, explanation, what, total in _CURVES:
        curves = {one.name: _mean_over_time(one.timeline, what, total=total) for one in compared}
        yield _lines(heading, explanation, curves, "minutes")


def _mean_over_time(timeline: Timeline, what: str, *, total: bool) -> Curve:
    """The mean over replicas, or their `total`, in `POINTS` equal intervals of time."""
    samples = [sample for row in timeline.samples.values() for sample in row]
    end_s = max((sample.time_s for sample in samples), default=1.0)
    factor = len(timeline.samples) if total else 1
    bins: list[list[float]] = [[] for _ in range(POINTS + 1)]
    for sample in samples:
        bins[int(POINTS * sample.time_s / end_s)].append(float(getattr(sample, what)))
    known = [(i, factor * fmean(values)) for i, values in enumerate(bins) if values]
    return Curve([end_s * i / POINTS / 60 for i, _ in known], [value for _, value in known])


def _timelines(compared: Sequence[Comparison]) -> Iterator[str]:
    """Timelines of equal length, so that their bars can be compared."""
    end = max((spans[-1].end_s for one in compared if (spans := one.timeline.trainer)), default=0.0) / 60
    for one in compared:
        rows = ["trainer", *_spread(sorted(one.timeline.samples, key=row_order), LANES_MAX)]
        drawn = bars.timeline(_spans(one.timeline, rows, SPANS_MAX // len(compared)), rows, end)
        yield bars.timeline_card(f"Timeline of {one.name}", TIMELINE if one is compared[0] else "", drawn)


def _spans(timeline: Timeline, rows: Sequence[str], spans_max: int) -> list[TimelineBar]:
    activity = Activity(spans_max)
    for name in rows[1:]:
        start_s = 0.0
        for sample in timeline.samples[name]:
            activity.add(name, start_s / 60, sample.time_s / 60, sample.busy)
            start_s = sample.time_s
    done = [("trainer", span) for span in timeline.trainer]
    done += [(name, span) for name, span in timeline.pulls if name in rows]
    return list(activity.spans) + [
        TimelineBar(name, s.what, s.start_s / 60, s.end_s / 60, f"{s.what} {s.version}") for name, s in done
    ]


def _spread(names: Sequence[str], count: int) -> list[str]:
    """At most `count` names, evenly chosen."""
    if len(names) <= count:
        return list(names)
    return [names[round(i * (len(names) - 1) / (count - 1))] for i in range(count)]
