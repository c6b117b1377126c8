"""A plan as a training configuration and as plain records, for the command line and the API."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from millrace.checks.derived import resolved_lines
from millrace.config.freeze import dump
from millrace.config.load import load, validate
from millrace_sim.config import PlanConfig
from millrace_sim.plan.ranking import Plan, plan, training_config
from millrace_sim.plan.search import Simulated

PLACEHOLDERS: dict[str, Any] = {
    "model": {"path": "path/to/model"},
    "task": {"kind": "file", "path": "path/to/rows.jsonl"},
    "reward": {"kind": "exact"},
}
"""`train` refuses these: neither path exists."""

DEVICES_OF_A_HOST = 8


def base_tree(file: Path | None) -> dict[str, Any]:
    """The training configuration, with every key, into which the plan is merged."""
    return PLACEHOLDERS if file is None else dump(load(file))


def configuration(answer: Plan, base: dict[str, Any]) -> str:
    """The plan merged into `base`, as TOML that `millrace train` accepts, because `train`'s loader read the
    plan.

    Raises: ConfigError: the plan contradicts `base`.
    """
    header = f"# Planned for {devices(answer)}: {answer.best.candidate.layout.describe()}."
    text = "\n".join([header, *resolved_lines(training_config(answer, base))]) + "\n"
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "planned.toml"
        file.write_text(text, encoding="utf-8")
        load(file)
    return text


def beyond(one: Simulated) -> list[str]:
    """Decisions of a plan that its configuration cannot express."""
    layout, missing = one.candidate.layout, []
    if layout.generation.dtype != "bf16":
        missing.append(f"generation in {layout.generation.dtype}: here it is float32 or bfloat16")
    if one.candidate.transport != "relay":
        missing.append(f"weights by {one.candidate.transport}: here they go through the relay")
    sizes = {one.tensor_parallel for one in (layout.generation, layout.other) if one is not None}
    if len(sizes) > 1:
        missing.append(
            f"replicas of {min(sizes)} and of {max(sizes)} devices: here all have one `rollout.tensor`"
        )
    num = sum(layout.used().values())
    if num > DEVICES_OF_A_HOST:
        missing.append(f'{num} devices are several hosts: `runtime.kind` "ray" (docs/cluster.md)')
    return missing


def checkpoints(answer: Plan) -> str:
    """How often to save, and what that costs."""
    best, hours = answer.checkpoints, answer.checkpoints.mtbf_s / 3600
    return (
        f"checkpoints.every = {best.every} steps ({best.interval_s:.0f} s), expected loss {best.loss:.2%}: "
        f"a device of the trainer fails every {hours:,.0f} h"
    )


def devices(answer: Plan) -> str:
    return " and ".join(f"{count} {name}" for name, count in answer.config.devices.items())


def choice(one: Simulated) -> str:
    candidate = one.candidate
    return (
        f"{candidate.layout.describe()}; {candidate.prompts} prompts, {schedule(one)}, {candidate.transport}"
    )


def schedule(one: Simulated) -> str:
    knobs = one.candidate.schedule.model_dump(exclude_defaults=True)
    knobs.pop("kind", None)
    return one.candidate.schedule.kind + "".join(f", {key} {value}" for key, value in knobs.items())


def as_json(answer: Plan, text: str) -> dict[str, Any]:
    return {
        "model": answer.config.model,
        "devices": answer.config.devices,
        "demand": asdict(answer.demand),
        "num_layouts": answer.num_layouts,
        "theory": [asdict(row) for row in answer.theory],
        "ranking": [
            {
                "plan": choice(one),
                "tokens_per_s": one.tokens_per_s,
                "predicted_step_s": one.candidate.layout.step_s,
                **one.result.as_dict(),
            }
            for one in answer.ranking
        ],
        "bottleneck": answer.bottleneck,
        "beyond_this_version": beyond(answer.best),
        "gains": [asdict(gain) for gain in answer.gains],
        "checkpoints": asdict(answer.checkpoints),
        "configuration": text,
    }


def planned_record(config: dict[str, Any], base: str | None) -> dict[str, Any]:
    """A plan as JSON types: what `millrace.plan` answers."""
    answer = plan(validate(PlanConfig, config, {}))
    return as_json(answer, configuration(answer, base_tree(Path(base) if base else None)))
