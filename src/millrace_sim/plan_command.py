"""`millrace plan`: decides which devices train and which generate, in which shape, under which schedule.

Of a run it says where the run is slow, and what a change would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from millrace.cli.options import AsJson, Overrides, print_json
from millrace.config.load import load_as
from millrace.core.errors import ConfigError
from millrace.core.wings import wing
from millrace.observe.terminal import Terminal
from millrace.run_directory import run_directory
from millrace_sim.config import PlanConfig
from millrace_sim.measure import ReplicaSample, TimedWork, Timeline
from millrace_sim.plan.planned import as_json, base_tree, beyond, checkpoints, choice, configuration, devices
from millrace_sim.plan.ranking import Plan, Theory, plan
from millrace_sim.plan.search import Simulated

console = Terminal(soft_wrap=True)


def command(
    plan_file: Annotated[
        Path,
        typer.Argument(metavar="PLAN|RUN", help="A TOML file, or a run's directory.", show_default=False),
    ],
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the best plan's training configuration here.")
    ] = None,
    json_wanted: AsJson = False,
) -> None:
    """Split a cluster: layouts that fit, LlamaRL's optimum, then a search with the simulator. Of a RUN: where
    it is slow, and what one more replica, slot, rank or reward worker would give, or a larger staleness
    bound."""
    if plan_file.is_dir():
        _of_run(plan_file, json_wanted, refused=bool(overrides or out))
        return
    config = load_as(PlanConfig, plan_file, overrides or ())
    base = base_tree(plan_file.parent / config.base if config.base else None)
    answer = plan(config, on_simulated=_print_simulated)
    text = configuration(answer, base)
    if out is not None:
        out.write_text(text, encoding="utf-8")
    if json_wanted:
        print_json(as_json(answer, text))
    else:
        _show(answer, text, out)


def _of_run(path: Path, json_wanted: bool, *, refused: bool) -> None:
    if refused:
        raise ConfigError(
            "`--set` and `--out` are for a plan from a TOML file: a run is measured as it is\n"
            "  `millrace simulate --from RUN --set KEY=VALUE` predicts one change of your own."
        )
    answer = wing("ui.speed_of")(run_directory.find(path), with_outlook=True)
    if json_wanted:
        print_json(answer.to_json())
    else:
        console.print(answer)


def _print_simulated(one: Simulated) -> None:
    progress = Terminal(stderr=True, soft_wrap=True)
    progress.print(f"{one.tokens_per_s:>10,.0f} tokens/s  {choice(one)}")


# ---------------------------------------------------------------- text


def _show(answer: Plan, text: str, out: Path | None) -> None:
    demand = answer.demand
    console.print(
        f"{answer.config.model} on {devices(answer)}: {answer.num_layouts} layouts fit in memory; a step of "
        f"{demand.samples} samples, {demand.prompt_tokens:.0f} + {demand.completion_tokens:.0f} tokens each\n"
    )
    console.print(
        "One kind of device alone, without length variance (LlamaRL, problems 6 and 7)", style="bold"
    )
    console.print(_theory_table(answer.theory))
    console.print("\nSimulated, fastest first", style="bold")
    console.print(_ranking(answer.ranking))
    for number, one in enumerate(answer.ranking, 1):
        console.print(f"{number}  {choice(one)}")
    console.print("\nPredicted timeline of the first (replicas: share of time spent decoding)", style="bold")
    for who, bar in timeline_lines(answer.best.timeline):
        console.print(f"{who:12} {bar}")
    console.print(f"\nThe bottleneck is {answer.bottleneck}.")
    for gain in answer.gains:
        console.print(
            f"One more {gain.device}: {gain.throughput:+.1%} predicted from mean lengths ({gain.role})"
        )
    console.print(f"Save {checkpoints(answer)}")
    missing = beyond(answer.best)
    if missing:
        console.print("\nIts configuration does not say:", style="bold")
    for lacking in missing:
        console.print(f"  {lacking}")
    console.print(f"\nIts configuration{f', in {out}' if out else ''}:\n", style="bold")
    console.print(text)


def _theory_table(rows: list[Theory]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("device", "synchronous", "asynchronous", "theta*", "train: m, b", "generate: m, b"):
        table.add_column(name, justify="left" if name == "device" else "right")
    for row in rows:
        sync, free = row.synchronous, row.asynchronous
        table.add_row(
            row.device,
            f"{sync.step_s:.1f} s" if sync else "does not fit",
            f"{free.step_s:.1f} s" if free else "does not fit",
            f"{free.theta:.2f}" if free else "",
            f"{free.train.model_parallel}, {free.train.batch}" if free else "",
            f"{free.generate.model_parallel}, {free.generate.batch}" if free else "",
        )
    return table


def _ranking(ranking: list[Simulated]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("", "tokens/s", "step", "predicted", "trainer waits", "replicas busy", "staleness", "fair"):
        table.add_column(name, justify="right")
    for number, one in enumerate(ranking, 1):
        result, layout = one.result, one.candidate.layout
        table.add_row(
            str(number),
            f"{one.tokens_per_s:,.0f}",
            f"{result.step_s:.1f} s",
            f"{layout.step_s:.1f} s",
            f"{result.trainer_waits:.0%}",
            f"{result.replica_busy:.0%}",
            f"{result.staleness_mean:.1f}",
            "-" if result.fairness is None else f"{result.fairness:.1f}",
        )
    return table


BLOCKS = " ▁▂▃▄▅▆▇█"
REPLICAS_SHOWN = 8
STEP, PUBLISH, WAIT = "█", "p", "·"


def timeline_lines(timeline: Timeline, *, width: int = 72) -> list[tuple[str, str]]:
    """(who, bar) of the trainer, a scale of versions, and up to `REPLICAS_SHOWN` replicas.

    A column is the same interval of time in every bar. The trainer's bar shows its main work; a replica's bar
    shows the fraction of time in which the replica decoded. Empty if nothing happened.
    """
    spans = timeline.trainer
    if not spans:
        return []
    start_s, end_s = spans[0].start_s, spans[-1].end_s
    column_s = (end_s - start_s) / width
    edges = [start_s + i * column_s for i in range(width + 1)]
    lines = [("trainer", _trainer(spans, edges)), ("version", _versions(spans, edges))]
    names = sorted(timeline.samples, key=lambda name: (len(name), name))[:REPLICAS_SHOWN]
    return lines + [(name, _replica(timeline.samples[name], edges)) for name in names]


def _trainer(spans: Sequence[TimedWork], edges: Sequence[float]) -> str:
    bar = ""
    for low, high in pairwise(edges):
        spent = {what: _overlap(spans, what, low, high) for what in ("step", "published")}
        if spent["step"] >= (high - low) / 2:
            bar += STEP
        else:
            bar += PUBLISH if spent["published"] >= (high - low) / 2 else WAIT
    return bar


def _overlap(spans: Sequence[TimedWork], what: str, low: float, high: float) -> float:
    return sum(
        max(0.0, min(span.end_s, high) - max(span.start_s, low)) for span in spans if span.what == what
    )


def _versions(spans: Sequence[TimedWork], edges: Sequence[float]) -> str:
    """The last digit of each version where its step ended."""
    bar = [" "] * (len(edges) - 1)
    for span in spans:
        if span.what == "step":
            index = int((span.end_s - edges[0]) / (edges[1] - edges[0]))
            bar[min(max(index, 0), len(bar) - 1)] = str(span.version % 10)
    return "".join(bar)


def _replica(samples: Sequence[ReplicaSample], edges: Sequence[float]) -> str:
    bar = ""
    for low, high in pairwise(edges):
        inside = [sample.busy for sample in samples if low <= sample.time_s < high]
        busy = sum(inside) / len(inside) if inside else _last(samples, low)
        bar += BLOCKS[round(busy * (len(BLOCKS) - 1))]
    return bar


def _last(samples: Sequence[ReplicaSample], before_s: float) -> float:
    earlier = [sample.busy for sample in samples if sample.time_s < before_s]
    return earlier[-1] if earlier else 0.0
