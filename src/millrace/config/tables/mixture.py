"""`task.kind = "mixture"`: several tasks, each with a weight and, if it needs one, a reward of its own."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from millrace.config.tables.section import NAME, Section
from millrace.config.tables.task import AnyReward, Task

BLOCK = 1000
"""Groups of the stream in which the shares of the parts are exact, to whole groups."""


class MixturePart(Section):
    name: str = Field(pattern=NAME)
    """What it is called in rows and metrics. Small letters, digits, `-` and `_`."""
    weight: float = Field(default=1.0, gt=0, le=1e6)
    """Its share of the prompts is `weight` over the sum of the weights."""
    task: Task
    """As `[task]`: where its prompts come from."""
    reward: AnyReward | None = Field(default=None, discriminator="kind")
    """As `[reward]`, without limits: those of `[reward]` hold. `"none"`: it is `[reward]`."""


class MixtureTaskSection(Section):
    kind: Literal["mixture"] = "mixture"
    """Several tasks in one stream of prompts, each with its weight."""
    parts: tuple[MixturePart, ...] = Field(min_length=1)
    """`task.parts` is a list of tables, each headed `[[task.parts]]`. See docs/data.md."""
    correct_at: float = Field(default=1.0, ge=-1e6, le=1e6)
    """A reward of at least this counts as correct in the metric NAME/pass_rate of a part."""

    @property
    def quotas(self) -> tuple[int, ...]:
        """Groups of each part in a block, by the method of the largest remainder. Their sum is `BLOCK`."""
        total = sum(part.weight for part in self.parts)
        due = [BLOCK * part.weight / total for part in self.parts]
        quotas = [int(one) for one in due]
        by_remainder = sorted(range(len(due)), key=lambda i: quotas[i] - due[i])
        for index in by_remainder[: BLOCK - sum(quotas)]:
            quotas[index] += 1
        return tuple(quotas)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [part.name for part in self.parts]
        for part, quota in zip(self.parts, self.quotas, strict=True):
            which = f"`task.parts` ({part.name})"
            if names.count(part.name) > 1:
                raise ValueError(f"{which}: it is the name of two: give each its own")
            if not quota:
                raise ValueError(
                    f"{which}: `weight` ({part.weight:g}) is less than one prompt in {BLOCK}: raise it, or "
                    "leave the part out"
                )
            if part.reward is None:
                continue
            for key in part.reward.changed_limits:
                raise ValueError(f"{which}: `{key}` is a limit of all parts: set `reward.{key}`")
        return self
