"""What a schedule will do, described before anything runs."""

from __future__ import annotations

from millrace.config.schema import Config
from millrace.schedule.deadlines import unbounded_groups_max
from millrace.schedule.presets import build
from millrace.schedule.schedule import Schedule


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
