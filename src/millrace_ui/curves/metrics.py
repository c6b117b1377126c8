"""Which quantities of a run can be drawn, in which order they are offered, and what they mean."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from millrace_ui.drawing.charts import rates, waits
from millrace_ui.drawing.meanings import FAIRNESS, GAP, STALENESS
from millrace_ui.record.steps import Steps

SPEED, WAITING = "time/trained_tokens_per_s", "time/wait_share"
MEASURED_BY_ITSELF = "wall_s"

_IMPORTANCE = "The importance weight: the probability of a token now, over that when it was sampled."

MEANINGS = {
    "reward/mean": "Mean over the trajectories of a step.",
    "trainer/reward_std": "Mean over the groups of a step of the standard deviation of their rewards.",
    "reward_metrics/*": "What the reward returned beside it. Mean over the trajectories that have it.",
    "trainer/kl_reference": "An estimate of the KL from the reference policy, in nats a token.",
    "trainer/kl_behavior": "An estimate of the KL from the policy that sampled, in nats.",
    "trainer/importance_mean": f"{_IMPORTANCE} Mean over the tokens.",
    "trainer/ess": "The share of the tokens that is left after they are weighted by importance.",
    "trainer/entropy": "Of the policy, in nats a token.",
    "trainer/lr": "The learning rate.",
    "trainer/loss": "Of the trainer.",
    "trainer/grad_norm": "The norm of the gradient before it is clipped.",
    "staleness/mean": STALENESS,
    "window/fairness": FAIRNESS,
    "logprob_gap/0/mean": GAP,
    SPEED: "Trained tokens per second of a step and the wait before it.",
    WAITING: "The share of its time in which the trainer waits for a batch.",
    "trainer/completion_tokens": "Tokens of a completion.",
    "trainer/truncated": "The share of the completions that a budget cut.",
    "trainer/groups_without_signal": "The share of the groups whose rewards are all equal.",
    "trainer/importance_capped": "The share of the tokens whose importance weight is above its cap.",
    "trainer/importance_*": _IMPORTANCE,
    "logprob_gap/*": GAP,
    "*staleness*": STALENESS,
}
"""What a metric means, by its name or a pattern. In this order metrics are offered, then the rest by name."""


def measured(runs: Iterable[Steps]) -> list[str]:
    """All metrics of any of the runs, in the order in which they are offered."""
    names = {name for steps in runs for name in steps.names() if name != MEASURED_BY_ITSELF}
    if "tokens/trained" in names and "time/step_s" in names:
        names |= {SPEED, WAITING}
    return sorted(names, key=lambda name: (_place(name), _parts(name)))


def column(steps: Steps, name: str) -> Sequence[float]:
    """One value a step."""
    computed = {SPEED: rates, WAITING: waits}.get(name)
    return computed(steps) if computed else steps.column(name)


def meaning(name: str) -> str:
    """Empty: its name says it."""
    return next((text for pattern, text in MEANINGS.items() if fnmatchcase(name, pattern)), "")


def _place(name: str) -> int:
    places = (i for i, pattern in enumerate(MEANINGS) if fnmatchcase(name, pattern))
    return next(places, len(MEANINGS))


def _parts(name: str) -> list[tuple[int, str]]:
    """So that 10 comes after 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]{1,9})", name)]
