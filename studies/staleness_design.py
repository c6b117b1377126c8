"""The runs of the study of staleness and their order. Pure.

A size is done after the other, and in a size a seed after the other. So whatever a study that stops early has
is a table of fewer seeds. First a size gets its learning rate: the one with the highest mean held-out reward
over the whole run at staleness 0, on seeds that are in no other run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import study  # noqa: F401  (finds benchmarks/)
from common import sized

RATE_SEEDS = (100, 101)
NONE = "none"
CORRECTIONS = {
    NONE: '{ kind = "grpo", clip = "none", correction = "none" }',
    "tis": '{ kind = "grpo" }',
    "bypass": '{ kind = "bypass" }',
    "decoupled": '{ kind = "decoupled" }',
    "gspo": '{ kind = "gspo", anchor = "behavior", correction = "none", normalize = "token" }',
    "m2po": '{ kind = "m2po" }',
    "icepop": '{ kind = "icepop" }',
    "sequence_tis": '{ kind = "sequence_tis" }',
}
"""Name -> `algorithm`. Advantages and counts are those of GRPO in all of them."""


@dataclass(frozen=True)
class Size:
    """A model with `layers` of `hidden`, and its runs.

    demonstrations       optimizer steps of the start model, at `demonstration_rate`
    steps                of a run; every `every` of them `held_out` prompts are sampled
    greedy               prompts of the greedy evaluation at the end
    rates                learning rates that are tried. A single one is taken
    staleness            without correction
    corrected            where corrections are compared. At staleness 0 each is the same algorithm as "none"
    corrections          which ones
    real                 the start is SmolLM2-135M-Instruct, and the task are the sums of examples/real
    """

    hidden: int
    layers: int
    demonstrations: int
    demonstration_rate: float
    steps: int
    rates: tuple[float, ...]
    every: int = 4
    held_out: int = 128
    greedy: int = 256
    staleness: tuple[int, ...] = (0, 1, 2, 4, 8, 16)
    corrected: tuple[int, ...] = (4, 16)
    corrections: tuple[str, ...] = tuple(CORRECTIONS)
    real: bool = False


SMOLLM2 = Size(
    *(576, 30, 0, 0.0, 40, (2e-6,), 8, 100, 100),
    staleness=(0, 2, 8),
    corrected=(2, 8),
    corrections=(NONE, "tis", "icepop"),
    real=True,
)
TINY = Size(32, 2, 2, 1e-3, 6, (1e-3, 2e-3), every=2, held_out=8, greedy=8)
SIZES = sized(
    {
        "0.8m": Size(128, 4, 220, 3e-3, 100, (5e-5, 1e-4, 2e-4, 4e-4, 8e-4)),
        "4m": Size(256, 5, 160, 2e-3, 100, (5e-5, 1e-4, 2e-4)),
        "135m": SMOLLM2,
    },
    {"0.8m": TINY},
)


RUN_S = {"0.8m": 15.0, "4m": 25.0, "135m": 300.0}
"""About the seconds of a run, as long as none of its size is finished."""


@dataclass(frozen=True)
class Run:
    size: str
    correction: str
    staleness: int
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.size}, {self.correction}, staleness {self.staleness}, {self.rate:g}, seed {self.seed}"


Arm = tuple[str, int]
"""(correction, staleness)"""


def arms(size: str, corrections: Sequence[str]) -> list[Arm]:
    """What everything is compared with, then both ends of the range, then the values between."""
    design = SIZES[size]
    names = [name for name in corrections if name in design.corrections]
    first = [(NONE, 0), *((name, staleness) for staleness in reversed(design.corrected) for name in names)]
    between = [(NONE, staleness) for staleness in design.staleness] if NONE in names else []
    return list(dict.fromkeys([*first, *between]))


def rate_runs(size: str) -> list[Run]:
    rates = SIZES[size].rates
    return [Run(size, NONE, 0, rate, seed) for seed in RATE_SEEDS for rate in rates if len(rates) > 1]


def chosen_rate(size: str, rewards: Mapping[Run, Sequence[float]]) -> float | None:
    """None: a run of `rate_runs` is missing. Of equal rates the smaller one."""
    if len(SIZES[size].rates) == 1:
        return SIZES[size].rates[0]
    runs = rate_runs(size)
    if any(run not in rewards for run in runs):
        return None
    means = {run: sum(rewards[run]) / len(rewards[run]) for run in runs}
    return max(SIZES[size].rates, key=lambda rate: sum(means[run] for run in runs if run.rate == rate))


def wanted(
    sizes: Sequence[str],
    seeds: Sequence[int],
    corrections: Sequence[str],
    rewards: Mapping[Run, Sequence[float]],
) -> Iterator[Run]:
    """All runs whose learning rate is known, in their order. A size without one ends the list."""
    for size in sizes:
        yield from rate_runs(size)
        rate = chosen_rate(size, rewards)
        if rate is None:
            return
        for seed in seeds:
            yield from (Run(size, *arm, rate, seed) for arm in arms(size, corrections))


def num_wanted(size: str, seeds: Sequence[int], corrections: Sequence[str]) -> int:
    return len(rate_runs(size)) + len(seeds) * len(arms(size, corrections))
