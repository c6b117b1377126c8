"""`[[evaluations]]`: what is measured of the model while it trains."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from millrace.config.tables.section import NAME, Count, Seconds, Section
from millrace.config.tables.task import AnyReward, FileTaskSection, FunctionTaskSection, GymTaskSection


class EvaluationSection(Section):
    name: str = Field(pattern=NAME)
    """What it is called in events, tables and the ledger. Small letters, digits, `-` and `_`."""
    every: Count = 20
    """Versions from one evaluated version to the next. The start model and the last version are evaluated
    too."""
    prompts: Count = 64
    """Number of prompts, each row once. All rows where the task has fewer."""
    samples: int = Field(default=4, ge=0, le=32)
    """Sampled completions of each prompt, beside a greedy one, by `[sampling]`. 0: greedy only."""
    task: GymTaskSection | FileTaskSection | FunctionTaskSection | None = Field(
        default=None, discriminator="kind"
    )
    """As `[task]`: where its prompts come from. `"none"`: other rows of the training's gym task. Any other
    task must be named, because its rows are trained on."""
    reward: AnyReward | None = Field(default=None, discriminator="kind")
    """As `[reward]`. `"none"`: the training's."""
    canary: Literal["rows", "wrong-gold"] | None = None
    """Its rows deserve no reward, so their reward must stay 0 (docs/evaluation.md). `"rows"`: those of
    `task` are impossible, or have a wrong gold answer. `"wrong-gold"`: each row is scored as another row,
    whose answer differs; without a `task` these may be the training's rows. `"none"`: no canary."""
    correct_at: float = 1.0
    """A reward of at least this is correct."""
    by: Literal["greedy", "sampled", "pass", "majority", "reward"] = "greedy"
    """The figure that `patience` and `keep_best` look at. `"greedy"`, `"sampled"`: the accuracy. `"pass"`,
    `"majority"`: pass@k and majority@k with k = `samples`. `"reward"`: the mean reward of the samples."""
    patience: Count | None = None
    """The run stops when `by` has not risen above its best for this many evaluations. `"none"`: it does not
    stop."""
    keep_best: bool = False
    """Keep the checkpoint of the version with the best `by`. `every` must be a multiple of
    `checkpoints.every`."""
    share: float = Field(default=0.5, gt=0, le=1)
    """Most of the time that the evaluator computes. Where it shares its processors with training, a batch
    takes at most 1 / (1 - `share`) times as long. 1: it never rests, for a device of its own."""
    timeout_s: Seconds = 3600.0
    """Longest time of one evaluation. After this time it is given up, and told as skipped."""
