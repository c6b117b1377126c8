"""`millrace plan`: which devices train, which generate, in which shape, under which schedule."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from millrace.cli.options import AsJson, Overrides
from millrace.config.freeze import dump
from millrace.config.load import load, load_as
from millrace.observe.terminal import Terminal
from millrace.session.derived import resolved_lines
from millrace.sim.costs.generation import Generation
from millrace.sim.plan.config import PlanConfig
from millrace.sim.plan.ranking import Plan, Theory, plan, training_config
from millrace.sim.plan.search import Simulated
from millrace.sim.report.timeline import timeline_lines

PLACEHOLDERS: dict[str, Any] = {
    "model": {"path": "path/to/model"},
    "task": {"kind": "gym", "name": "chain_sum"},
    "reward": {"kind": "gym"},
}

console = Terminal(soft_wrap=True, width=160)


def command(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A TOML file.", show_default=False)],
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the best plan's training configuration here.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Split a cluster: layouts that fit, LlamaRL's optimum, then a search with the simulator."""
    config = load_as(PlanConfig, plan_file, overrides or ())
    base = _base(config, plan_file)
    answer = plan(config, on_simulated=_told)
    text = _configuration(answer, base)
    if out is not None:
        out.write_text(text, encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(_as_json(answer, text), indent=2))
    else:
        _show(answer, text, out)


def _base(config: PlanConfig, plan_file: Path) -> dict[str, Any]:
    """The training configuration that the choices are laid over, every key."""
    if config.base is None:
        return PLACEHOLDERS
    return dump(load(plan_file.parent / config.base))


def _configuration(answer: Plan, base: dict[str, Any]) -> str:
    """TOML that `millrace train` accepts, for it was loaded as `train` loads it: what was chosen and what
    `base` says.

    Raises: ConfigError: the choices contradict `base`.
    """
    header = f"# Planned for {_devices(answer)}: {answer.best.candidate.layout.describe()}."
    text = "\n".join([header, *resolved_lines(training_config(answer, base))]) + "\n"
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "planned.toml"
        file.write_text(text, encoding="utf-8")
        load(file)
    return text


def _told(one: Simulated) -> None:
    progress = Terminal(stderr=True, soft_wrap=True)
    progress.print(f"{one.tokens_per_s:>10,.0f} tokens/s  {_choice(one)}")


def _devices(answer: Plan) -> str:
    return " and ".join(f"{count} {name}" for name, count in answer.config.devices.items())


# ---------------------------------------------------------------- text


def _show(answer: Plan, text: str, out: Path | None) -> None:
    demand = answer.demand
    console.print(
        f"{answer.config.model} on {_devices(answer)}: {answer.num_layouts} layouts fit in memory; a step of "
        f"{demand.samples} samples, {demand.prompt_tokens:.0f} + {demand.completion_tokens:.0f} tokens each\n"
    )
    console.print(
        "One kind of device alone, without length variance (LlamaRL, problems 6 and 7)", style="bold"
    )
    console.print(_theory_table(answer.theory))
    console.print("\nSimulated, fastest first", style="bold")
    console.print(_ranking(answer.ranking))
    console.print("\nPredicted timeline of the first (replicas: share of time spent decoding)", style="bold")
    for who, bar in timeline_lines(answer.best.timeline):
        console.print(f"{who:12} {bar}")
    console.print(f"\nThe bottleneck is {answer.bottleneck}.")
    for gain in answer.gains:
        console.print(f"One more {gain.device}: {gain.throughput:+.1%} predicted ({gain.role})")
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
    for name in ("train / mp", "generate", "slots", "prompts", "schedule"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens/s", "step", "predicted", "trainer waits", "replicas busy", "staleness"):
        table.add_column(name, justify="right")
    for one in ranking:
        result, layout = one.result, one.candidate.layout
        table.add_row(
            f"{layout.training.devices} {layout.training.device.name} / {layout.training.model_parallel}",
            f"{layout.replicas} x {_replica(layout.generation)}",
            str(layout.slots),
            str(one.candidate.prompts),
            _schedule(one) + (f", {one.candidate.transport}" if one.candidate.transport != "relay" else ""),
            f"{one.tokens_per_s:,.0f}",
            f"{result.step_s:.1f} s",
            f"{layout.step_s:.1f} s",
            f"{result.trainer_waits:.0%}",
            f"{result.replica_busy:.0%}",
            f"{result.staleness_mean:.1f}",
        )
    return table


def _choice(one: Simulated) -> str:
    candidate = one.candidate
    return (
        f"{candidate.layout.describe()}; {candidate.prompts} prompts, {_schedule(one)}, {candidate.transport}"
    )


def _schedule(one: Simulated) -> str:
    knobs = one.candidate.schedule.model_dump(exclude_defaults=True)
    knobs.pop("kind", None)
    return one.candidate.schedule.kind + "".join(f", {key} {value}" for key, value in knobs.items())


def _replica(generation: Generation) -> str:
    return f"{generation.tensor_parallel} {generation.device.name} {generation.dtype}"


def _as_json(answer: Plan, text: str) -> dict[str, Any]:
    return {
        "model": answer.config.model,
        "devices": answer.config.devices,
        "demand": asdict(answer.demand),
        "num_layouts": answer.num_layouts,
        "theory": [asdict(row) for row in answer.theory],
        "ranking": [
            {
                "plan": _choice(one),
                "tokens_per_s": one.tokens_per_s,
                "predicted_step_s": one.candidate.layout.step_s,
                **one.result.as_dict(),
            }
            for one in answer.ranking
        ],
        "bottleneck": answer.bottleneck,
        "gains": [asdict(gain) for gain in answer.gains],
        "configuration": text,
    }
