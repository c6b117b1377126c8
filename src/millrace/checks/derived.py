"""`train --dry-run`: the resolved configuration and every number derived from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from millrace.checks.first_try import FirstTry
from millrace.config.freeze import config_digest, dump
from millrace.config.schema import Config
from millrace.config.tables.evaluations import EvaluationSection
from millrace.config.toml_text import as_toml
from millrace.controller.evaluation.due import due
from millrace.core.errors import MillraceError
from millrace.core.types import Abstain, Scored
from millrace.observe.terminal import Terminal
from millrace.placement import describe
from millrace.placement.assign import size
from millrace.run.compose import place
from millrace.schedule.deadlines import unbounded_groups_max
from millrace.schedule.presets import build
from millrace.schedule.schedule import Schedule

PROMPT_SHOWN = 500


def show(config: Config) -> None:
    """Print to stdout. If the model is not there yet, only its numbers are missing."""
    console = Terminal(soft_wrap=True)
    for line in resolved_lines(dump(config)):
        console.print(line)
    for title, rows in derived(config).items():
        console.print(f"\n{title}", style="bold")
        console.print(_table(rows))


def show_first_try(first: FirstTry) -> None:
    """Print the first prompt of the run, and the reward's answer."""
    console = Terminal(soft_wrap=True)
    for title, rows in _first_try(first).items():
        console.print(f"\n{title}", style="bold")
        console.print(_table(rows))
    console.print("\nNothing was found that would keep this run from starting.", style="green")


def _first_try(first: FirstTry) -> dict[str, dict[str, str]]:
    task, (attempt, timed) = first.task, first.tried[-1]
    score = "no opinion" if isinstance(timed.score, Abstain) else ""
    if isinstance(timed.score, Scored):
        extra = "".join(f", {name} {value:g}" for name, value in timed.score.metrics.items())
        score = f"{timed.score.value:g}{extra}"
    prompt = {
        "row": task.prompt.row_id,
        "text": shown(task.prompt.text),
        "tokens": str(len(task.prompt.tokens)),
        "rows in all": f"{task.rows:,}",
    }
    return {"First prompt": prompt, "Reward": {attempt.kind: f"{score}, in {timed.seconds:.3f} s"}}


def shown(text: str) -> str:
    """The text as one readable line, cut if it is long."""
    return repr(text) if len(text) <= PROMPT_SHOWN else repr(text[:PROMPT_SHOWN]) + "..."


def resolved_lines(tree: dict[str, Any]) -> list[str]:
    """The tree as TOML that loads to the same configuration; `kind` first, None as `"none"`."""
    lines = [f"{name} = {as_toml(value)}" for name, value in tree.items() if not isinstance(value, dict)]
    for name, table in tree.items():
        if isinstance(table, dict):
            keys = sorted(table, key=lambda key: key != "kind")
            lines += ["", f"[{name}]", *(f"{key} = {as_toml(table[key])}" for key in keys)]
    return lines


def derived(config: Config) -> dict[str, dict[str, str]]:
    """Tables of name -> value: the batch, the schedule, memory."""
    tables = {"Batch": _batch(config), "Schedule": explain(config)}
    if config.evaluations:
        tables["Evaluations"] = {one.name: _evaluation(config, one) for one in config.evaluations}
    try:
        tables["Memory"] = _memory(config)
    except MillraceError as error:
        tables["Memory"] = {"unknown": str(error)}
    return tables


def _evaluation(config: Config, one: EvaluationSection) -> str:
    completions = one.prompts * (1 + one.samples)
    return (
        f"of {len(due(one.every, 0, config.steps, last=config.steps))} versions, {one.prompts} prompts x "
        f"(1 greedy + {one.samples}) = {completions} completions; the evaluator computes for at most "
        f"{one.share:.0%} of the time"
    )


def _batch(config: Config) -> dict[str, str]:
    batch, trajectories = config.batch, config.trajectories_per_step
    each = config.completion_tokens_max
    tokens_max = trajectories * config.rollout.max_sequence_tokens
    slots = config.rollout.replicas * config.rollout.slots
    micro_batches = -(-tokens_max // batch.token_budget)
    rows = "1 micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
    if (sharing := config.trainer.shard) > 1:
        rows += f", among {sharing} ranks"
    return {
        "trajectories a step": f"{batch.prompts} prompts x {batch.group_size} = {trajectories}",
        "completion tokens a step, at most": f"{trajectories} x {each} = {trajectories * each}",
        "tokens a step, at most": f"{trajectories} x {config.rollout.max_sequence_tokens} = {tokens_max}",
        "such a step in the trainer": f"{tokens_max} / {batch.token_budget}: {rows}",
        "trajectories of the run": f"{config.steps} steps x {trajectories} = {config.steps * trajectories}",
        "decode slots": f"{config.rollout.replicas} replicas x {config.rollout.slots} = {slots}",
        "config digest": config_digest(config),
    }


def _memory(config: Config) -> dict[str, str]:
    layout = place(config)
    needs = layout.main.needs
    return {
        "parameters": f"{needs.num_parameters:,} in {Path(config.model.path).name}",
        "one version": size(needs.weights_bytes),
        "KV of a token": f"{needs.kv_token_bytes} bytes",
        **describe.tables(layout),
        "a checkpoint on disk": size(needs.checkpoint_bytes),
    }


def _table(rows: dict[str, str]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def explain(config: Config) -> dict[str, str]:
    """Rows of name -> text, in the order in which they are read.

    Rows: `kind`; `staleness, worst case`; `groups live, at most` with its arithmetic (generated, buffered
    and being trained); then one row for each decision: `admit`, `route`, `refresh`, `repack`, `take`.
    """
    schedule = build(config)
    groups, arithmetic = groups_live_max(config, schedule)
    size = config.batch.group_size + schedule.redundant_samples
    trajectories = f"x {size} = {groups * size} trajectories"
    bound = schedule.staleness_max
    return {
        "kind": schedule.kind,
        "staleness, worst case": "unbounded" if bound is None else f"{bound} versions",
        "groups live, at most": f"{arithmetic} = {groups} {trajectories}",
        **schedule.describe(),
    }


def groups_live_max(config: Config, schedule: Schedule) -> tuple[int, str]:
    """The most live groups, the batch being trained included, and the arithmetic."""
    prompts, steps, bound = config.batch.prompts, config.steps, schedule.staleness_max
    more = schedule.redundant_groups
    redundant = f" + {more} redundant" if more else ""
    if bound is not None and bound + 1 <= steps:
        return (bound + 1) * prompts + more, f"(staleness {bound} + 1) x {prompts} prompts{redundant}"
    if bound is None:
        slots = config.rollout.replicas * config.rollout.slots
        ahead = unbounded_groups_max(slots, prompts, config.batch.group_size + schedule.redundant_samples)
        if ahead + prompts <= steps * prompts + more:
            return ahead + prompts, f"{ahead} ahead of the trainer + {prompts} being trained"
    return steps * prompts + more, f"{steps} steps x {prompts} prompts{redundant}"
