"""The file of a sweep: which runs, by which metric they are compared, and when one is given up."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from millrace.config.tables.section import COUNT_MAX, Count, Section, Seed
from millrace_sweeps.decisions.space import choices, domains


def _base(value: Any) -> Any:
    """Raises: ValueError: it is neither a path nor a table."""
    if isinstance(value, str | dict) and value:
        return value
    raise ValueError(
        f"`base` ({value!r}) must be the configuration that every trial changes.\n"
        '  Write base = "run.toml", or its tables as [base.model], [base.task] and so on'
    )


def _at_once(value: Any) -> Any:
    """Raises: ValueError: it is neither a count nor "auto"."""
    if value == "auto" or (type(value) is int and 1 <= value <= COUNT_MAX):
        return value
    raise ValueError(
        f"`at_once` ({value!r}) must be a number of runs, from 1.\n"
        '  Or write at_once = "auto": as many as the cores, memory and GPUs of this host hold'
    )


class RandomSearch(Section):
    trials: Count
    """Configurations that are drawn. With more, the first stay the same."""
    seed: Seed = 0
    """Seed of the draws, not of the runs."""
    keys: dict[str, Any]
    """A list of choices for each key, or a range `{ low = 1e-5, high = 1e-3, log = true }`. Both ends may be
    drawn. Two integers are a range of integers."""


class OptunaSearch(Section):
    trials: Count
    """Configurations that Optuna proposes, each after the results of those before."""
    seed: Seed = 0
    """Seed of the sampler."""
    sampler: Literal["tpe", "gp"] = "tpe"
    """Optuna's `TPESampler` or `GPSampler`. The first 10 combinations are random with both."""
    keys: dict[str, Any]
    """As `random.keys`."""


class MedianRule(Section):
    kind: Literal["median"] = Field(
        default="median",
        description="A trial ends whose best value so far is below the median of the finished trials' means.",
    )
    steps_min: Count = 10
    """No trial ends before so many steps."""
    trials_min: Count = 3
    """No trial ends before so many trials have finished."""


class HalvingRule(Section):
    kind: Literal["halving"] = Field(
        default="halving",
        description="At `steps_min`, `steps_min` * `factor` and so on only the best 1 / `factor` go on.",
    )
    steps_min: Count = 10
    """The first step at which trials are compared."""
    factor: int = Field(default=3, ge=2, le=1000)
    """One in so many goes on."""


class SweepConfig(Section):
    """A sweep."""

    base: Annotated[str | dict[str, Any], BeforeValidator(_base)]
    """The run's configuration that the trials change: a file, relative to this one, or its tables."""
    grid: dict[str, Any] = Field(default_factory=dict)
    """A list of values for each key of the configuration: every combination is a trial."""
    random: RandomSearch | None = None
    """Combinations drawn at random."""
    optuna: OptunaSearch | None = None
    """Combinations that Optuna proposes, from the results so far."""
    seeds: tuple[Seed, ...] = ()
    """Each combination is run with each of these values of `seed`."""
    metric: str = Field(default="reward/mean", min_length=1)
    """What trials are compared by: a name of `metrics.jsonl`, or `evaluation/NAME` of `[[evaluations]]`."""
    last: float = Field(default=0.2, gt=0, le=1)
    """A trial's value is the mean of the metric over this last share of its steps."""
    goal: Literal["max", "min"] = "max"
    """Whether a higher or a lower value is better."""
    at_once: Annotated[int | Literal["auto"], BeforeValidator(_at_once)] = 1
    """Runs at once. `"auto"`: as many as the cores, memory and GPUs of this host hold."""
    stop: MedianRule | HalvingRule | None = Field(default=None, discriminator="kind")
    """The rule that ends trials early."""

    @property
    def sign(self) -> int:
        """A value times this is better if it is higher."""
        return 1 if self.goal == "max" else -1

    @property
    def search(self) -> RandomSearch | OptunaSearch | None:
        return self.random or self.optuna

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in ("grid", "random", "optuna") if getattr(self, name)]
        if len(given) > 1:
            named = " and ".join(f"`{name}`" for name in given)
            raise ValueError(f"{named} exclude each other.\n  Keep one of them: a sweep has one search")
        if not given and not self.seeds:
            raise ValueError(
                "`grid`, `random`, `optuna` and `seeds` are missing: there is nothing to try.\n"
                '  Add [grid] with "optimizer.lr" = [1e-4, 1e-3], or seeds = [1, 2, 3]'
            )
        table = f"{given[0]}.keys" if given and given[0] != "grid" else "grid"
        keys = choices(self.grid) if self.search is None else domains(self.search.keys, table)
        if self.seeds and "seed" in keys:
            raise ValueError(f"`{table}.seed` and `seeds` both set the seed.\n  Leave one of them out")
        if len({json.dumps(seed) for seed in self.seeds}) < len(self.seeds):
            raise ValueError(f"`seeds` ({list(self.seeds)}) has a seed twice.\n  Leave one of them out")
        return self
