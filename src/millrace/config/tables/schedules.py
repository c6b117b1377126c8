"""`[schedule]`: who generates what, when, under which weights.

One class a preset: each preset has keys of its own.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from millrace.config.tables.section import Count, CountOrZero, Seconds, Section

_MIX = """Where versions may mix in a trajectory. `"within"`: a replica takes newer weights at once, in the
middle of turns. `"between"`: a turn has one version, and the next turn may have a later one. `"never"`: all
turns have one version. A trajectory whose version is gone begins again."""
Mix = Annotated[Literal["within", "between", "never"], Field(description=_MIX)]

_SAMPLES = """Trajectories that a group starts beyond `batch.group_size`. The first that have a reward are
trained, and the rest ends. Short and quick trajectories are favoured: see reports/stragglers.md."""
RedundantSamples = Annotated[CountOrZero, Field(description=_SAMPLES)]
_GROUPS = """Groups that may end because they miss their deadline. The trainer waits for no more than the
others."""
RedundantGroups = Annotated[CountOrZero, Field(description=_GROUPS)]


class Synchronous(Section):
    kind: Literal["synchronous"] = "synchronous"


class LlamaRL(Section):
    kind: Literal["llamarl"] = "llamarl"
    lag: CountOrZero = 1
    """Batches that generation may run ahead. This is also the staleness bound, in versions."""
    iteration_tokens: Count | None = None
    """Decode steps under one version, before a replica takes newer weights with trajectories in flight.
    `"none"`: `sampling.max_tokens` / (`lag` + 1)."""


class AReaL(Section):
    kind: Literal["areal"] = "areal"
    eta: CountOrZero = 4
    """Staleness bound, in versions."""


class Laminar(Section):
    kind: Literal["laminar"] = "laminar"
    staleness_max: CountOrZero | None = 4
    """Staleness bound, in versions. `"none"`: no bound, as in the paper."""
    round_groups: Count | None = None
    """Groups that a replica starts under one version. `"none"`: `batch.prompts` / the number of replicas."""
    repack: bool = True
    """Collect the last trajectories of nearly idle replicas. The emptied replicas take new weights."""
    repack_interval_s: Seconds = 5.0
    """Time between two decisions on repacking. The schedule also decides after each batch."""
    kv_fraction_max: float = Field(default=0.9, gt=0, le=1)
    """A replica receives trajectories up to this fraction of its KV memory (the paper's C_max)."""
    batch_max: Count | None = None
    """A replica receives trajectories up to this number (the paper's batch B). `"none"`: `rollout.slots`."""


class Millrace(Section):
    kind: Literal["millrace"] = "millrace"
    staleness_max: CountOrZero | None = 4
    """Staleness bound: the largest staleness allowed, in versions. `"none"`: no bound. The usual staleness
    follows from `ahead`."""
    ahead: float | None = Field(default=None, ge=1, le=64)
    """Batches that generation runs ahead of the trainer. With long completions a larger number is faster, and
    the data is older. `"none"`: derived from measured durations. Where the trainer is the slower side, the
    derived number is at most half of the bound."""
    repack_interval_s: Seconds = 5.0
    """Time between two decisions on repacking. The schedule also decides after each batch."""
    batch_max: Count | None = None
    """A replica receives trajectories up to this number. `"none"`: as many as surely fit, at most 48."""
    mix: Literal["between", "never"] = "between"
    """`"between"`: a turn has one version, and the next turn may have a later one. `"never"`: all turns of a
    trajectory have one version."""
    redundant_samples: RedundantSamples = 0
    redundant_groups: RedundantGroups = 0


class RLAX(Section):
    kind: Literal["rlax"] = "rlax"
    reload_staleness: CountOrZero = 0
    """A replica takes new weights as soon as it is more than this many versions behind. Its trajectories
    begin again."""
    acceptance_staleness: CountOrZero = 0
    """Staleness bound, in versions: the trainer accepts nothing staler."""

    @model_validator(mode="after")
    def _reload_within_acceptance(self) -> RLAX:
        if self.reload_staleness > self.acceptance_staleness:
            raise ValueError(
                f"`schedule.reload_staleness` ({self.reload_staleness}) must not exceed "
                f"`schedule.acceptance_staleness` ({self.acceptance_staleness}): "
                "replicas would generate what the trainer refuses"
            )
        return self


class RLBoost(Section):
    kind: Literal["rlboost"] = "rlboost"
    staleness_max: CountOrZero = 4
    """Staleness bound, in versions."""


class RollFlash(Section):
    kind: Literal["roll_flash"] = "roll_flash"
    alpha: CountOrZero = 2
    """The asynchronous ratio: the staleness bound, in versions."""
    redundant_samples: RedundantSamples = 1
    redundant_groups: RedundantGroups = 1
    mix: Mix = "within"


class RollPacker(Section):
    kind: Literal["rollpacker"] = "rollpacker"
    redundant_samples: CountOrZero = 2
    """Trajectories that a group starts beyond `batch.group_size` in a short round. The first that have a
    reward are trained, and the rest ends."""
    redundant_groups: CountOrZero | None = None
    """Groups that a short round starts beyond `batch.prompts`. Those that are not trained wait for a long
    round, and begin again there. `"none"`: a quarter of `batch.prompts`."""


class StreamRL(Section):
    kind: Literal["streamrl"] = "streamrl"
    staleness_max: CountOrZero = 1
    """Staleness bound, in versions."""
    mix: Mix = "between"


class StaleFlow(Section):
    kind: Literal["staleflow"] = "staleflow"
    staleness_max: CountOrZero = 3
    """Staleness bound, in versions: the paper's eta."""


class Heddle(Section):
    kind: Literal["heddle"] = "heddle"
    staleness_max: CountOrZero = 0
    """Staleness bound, in versions. 0: synchronous, as in the paper."""


class FunctionSchedule(Section):
    kind: Literal["function"] = "function"
    path: str
    """`package.module:name` or `file.py:name`: a function that takes the whole configuration and returns a
    `millrace.schedule.Schedule`. See examples/schedule.py."""
    staleness_max: CountOrZero | None = 4
    """Staleness bound, in versions, for the function to use. A schedule that permits more is refused.
    `"none"`: no bound."""


Redundant = Millrace | RollFlash | RollPacker
"""Schedules under which a group starts more trajectories than a batch needs."""
Schedule = Annotated[
    Synchronous
    | LlamaRL
    | AReaL
    | Laminar
    | Millrace
    | RLAX
    | RLBoost
    | RollFlash
    | RollPacker
    | StreamRL
    | StaleFlow
    | Heddle
    | FunctionSchedule,
    Field(discriminator="kind"),
]


def redundant_samples(schedule: Schedule) -> int:
    """Trajectories that a group starts beyond `batch.group_size`."""
    return schedule.redundant_samples if isinstance(schedule, Redundant) else 0
