"""Evaluations while training: a model that gets worse while its reward rises, and a slow evaluator."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from millrace.diagnose.evidence import Accuracy, Evidence
from millrace.diagnose.finding import Finding

DUE_MIN = 4  # fewer versions prove nothing
SKIPPED_MAX = 0.5


def overfitting(evidence: Evidence) -> Finding | None:
    lines = [line for name, series in evidence.evaluated.items() for line in _fallen(evidence, name, series)]
    return Finding("overfitting", tuple(lines), _OVERFITTING) if lines else None


def evaluations_skipped(evidence: Evidence) -> Finding | None:
    lines = []
    for name, skipped in evidence.skipped.items():
        done = len(evidence.evaluated.get(name, {})) + len(evidence.canary_rewards.get(name, {}))
        if skipped + done >= DUE_MIN and skipped > SKIPPED_MAX * (skipped + done):
            lines.append(f"evaluation {name} skipped {skipped} of {skipped + done} versions that were due")
    return Finding("evaluations-skipped", tuple(lines), _SKIPPED) if lines else None


def _fallen(evidence: Evidence, name: str, series: dict[int, Accuracy]) -> Iterator[str]:
    """The newest interval lies below the best version's interval, and the training reward rose since then."""
    if not series:
        return
    best = max(series, key=lambda version: (series[version].greedy, -version))
    last = max(series)
    if series[last].high >= series[best].low:
        return
    rewards = [(step.version, step.reward_mean) for step in evidence.steps]
    until = [reward for version, reward in rewards if version <= best]
    since = [reward for version, reward in rewards if version > best]
    if until and since and fmean(since[-len(since) // 2 :]) > fmean(until[-len(since) :]):
        yield (
            f"the greedy accuracy of evaluation {name} fell from {series[best].greedy:.3g} at version {best} "
            f"to {series[last].greedy:.3g} at version {last}, and the intervals of 95 % do not meet; the "
            "training reward rose meanwhile"
        )


_OVERFITTING = (
    "the policy learns the training rows or the reward, and not the task: read samples with "
    "`millrace show RUN --best`, and mend a reward that garbage satisfies",
    "take more rows or fewer steps. `keep_best` and `patience` of `[[evaluations]]` keep the best version",
)
_SKIPPED = (
    "the evaluator is slower than versions are due: raise `every`, lower `prompts` or `samples`, or raise "
    "`share` of `[[evaluations]]`",
)
