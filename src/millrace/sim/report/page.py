"""A simulated run, or several compared, as one HTML file that needs no other."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from bokeh.embed import components
from bokeh.plotting import figure
from bokeh.resources import Resources

from millrace.sim.costs.cluster import ClusterCosts
from millrace.sim.report import figures
from millrace.sim.report.compare import Comparison
from millrace.sim.simulation import Scenario

_STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 980px; margin: 2em auto; color: #222; }
h2 { margin: 1.6em 0 .3em; font-size: 1.15em; } p { margin: .2em 0 .8em; color: #555; }
table { border-collapse: collapse; } td, th { padding: .2em .9em .2em 0; text-align: right; }
td:first-child, th:first-child { text-align: left; } th { border-bottom: 1px solid #bbb; }
"""

LANES_MIN, LANES_MAX = 8, 40
"""Replicas on the timelines: at least of each schedule, about of all together. The file stays under 2 MB."""

Part = tuple[str, str, figure]
"""Heading, explanation, plot."""


def page(title: str, base: Scenario, compared: Sequence[Comparison], rows: Sequence[Sequence[str]]) -> str:
    """`base` with other schedules and seeds gave `compared`. `rows` is the table of the terminal."""
    sections = _sections(compared)
    script, divisions = components([plot for _, _, plot in sections])
    parts = [f"<h1>{escape(title)}</h1><p>{escape(_about(base, compared))}</p>", _table(rows)]
    for (heading, explanation, _), division in zip(sections, divisions, strict=True):
        parts.append(f"<h2>{escape(heading)}</h2><p>{escape(explanation)}</p>{division}")
    library = Resources(mode="inline", components=["bokeh"]).render()
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>{library}</head>"
        f"<body>{''.join(parts)}{script}</body></html>\n"
    )


def _about(base: Scenario, compared: Sequence[Comparison]) -> str:
    """What was simulated, in words."""
    batch, costs, seeds = base.config.batch, base.costs, len(compared[0].results)
    where = str(costs.cluster) if isinstance(costs, ClusterCosts) else "roles as fast as those of a real run"
    return (
        f"The real controller ran in virtual time: {base.config.steps} optimizer steps, "
        f"{batch.prompts} prompts a step, {batch.group_size} trajectories a prompt, "
        f"{seeds} seed{'s' * (seeds > 1)} a schedule. The controller led {where}. "
        "No model ran: every duration comes from a model of its cost."
    )


def _sections(compared: Sequence[Comparison]) -> list[Part]:
    timelines = {one.name: one.timeline for one in compared}
    rates = {one.name: one.estimate("trained_tokens_per_s") for one in compared}
    steps = {one.name: one.estimate("step_s") for one in compared}
    staleness = {one.name: one.results[0].staleness for one in compared}
    fair = {one.name: known for one in compared if (known := one.known("fairness")) is not None}
    sections = [
        (
            "Throughput",
            "Trained tokens per second. The line is the 95 % confidence interval over seeds.",
            figures.estimates(rates, "tokens/s"),
        ),
        (
            "Step time",
            "Seconds from one optimizer step to the next.",
            figures.estimates(steps, "seconds"),
        ),
        (
            "Staleness",
            "Share of trained tokens by their staleness in optimizer steps (first seed).",
            figures.histograms(staleness),
        ),
        *([("Fairness", _FAIRNESS, figures.estimates(fair, "fairness"))] if fair else []),
        (
            "KV cache",
            "Share of the replicas' KV memory in use (first seed).",
            figures.curves(timelines, "kv", "KV memory used", "0%", total=False),
        ),
        (
            "Trajectories running",
            "All replicas together (first seed).",
            figures.curves(timelines, "running", "trajectories", "0,0", total=True),
        ),
    ]
    shown = max(LANES_MIN, LANES_MAX // len(timelines))
    for name, timeline in timelines.items():
        sections.append((f"Who does what: {name}", _LANES, figures.lanes(timeline, shown)))
    return sections


_FAIRNESS = (
    "Variance between batches of the mean completion length, over what random batches of the same groups "
    "would have. 1: fair samples; above 1: short completions are trained together, and long ones. The line "
    "is the 95 % confidence interval over seeds."
)
_LANES = (
    "Grey is work: an optimizer step of the trainer, decoding of a replica. The darker, the larger the share "
    "of time in which the replica decoded. Magenta is weights on their way: the trainer publishes them, or a "
    "replica takes them."
)


def _table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f"<table><tr>{head}</tr>{body}</table>"
