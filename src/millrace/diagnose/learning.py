"""Why a run with right weights learns nothing: its rewards fail, its groups are all equal, or it diverges."""

from __future__ import annotations

from statistics import fmean, median

from millrace.diagnose.evidence import Evidence, Step
from millrace.diagnose.finding import Finding

FAILED_MAX = 0.05  # of all scores
EQUAL_MAX = 0.8  # of the groups of the later steps
STEPS_MIN = 4  # fewer steps have no trend
TIMES = 10.0
COLLAPSED = 0.1  # of the entropy at the start, while the reward has not risen
RISEN = 0.05  # a rise of the mean reward, as a share of its range


def failing_rewards(evidence: Evidence) -> Finding | None:
    total, failed = evidence.outcomes.total(), evidence.outcomes["failed"]
    if not total or failed / total <= FAILED_MAX:
        return None
    lines = [f"{failed} of {total} scores failed"]
    lines += [f"{num} times: {reason}" for reason, num in evidence.failures.most_common(3)]
    return Finding("failing-rewards", tuple(lines), _FAILING_REWARDS)


def no_signal(evidence: Evidence) -> Finding | None:
    late = evidence.steps[len(evidence.steps) // 2 :]
    equal = [s.metrics["groups_without_signal"] for s in late if "groups_without_signal" in s.metrics]
    if not equal or not evidence.compares or fmean(equal) < EQUAL_MAX:
        return None
    reward = fmean(step.reward_mean for step in late)
    line = (
        f"in {fmean(equal):.0%} of the groups of the last {len(late)} steps all rewards are equal, so the "
        f"advantages are zero. The mean reward in these steps is {reward:.3g}"
    )
    custom = evidence.algorithm == "function"
    return Finding("no-signal", (line,), _NO_SIGNAL if custom else (*_NO_SIGNAL, _RESAMPLE))


def diverging_optimizer(evidence: Evidence) -> Finding | None:
    lines = [*_not_finite(evidence), *_trends(evidence.steps)]
    return Finding("diverging-optimizer", tuple(lines), _DIVERGING) if lines else None


def _not_finite(evidence: Evidence) -> list[str]:
    ours = evidence.end.startswith(("TrainingError", "WeightsError"))
    return [f"the run ended with {evidence.end.splitlines()[0]}"] if ours and "finite" in evidence.end else []


def _trends(steps: list[Step]) -> list[str]:
    if len(steps) < STEPS_MIN:
        return []
    lines, quarter = [], max(1, len(steps) // 4)
    norms = [step.metrics.get("grad_norm", 0.0) for step in steps]
    early, late = median(norms[: 2 * quarter]), median(norms[-quarter:])
    if late > TIMES * early > 0:
        lines.append(f"the gradient norm rose from {early:.3g} to {late:.3g}")
    entropies = [step.metrics.get("entropy", 0.0) for step in steps]
    rewards = [step.reward_mean for step in steps]
    gained = fmean(rewards[-quarter:]) - fmean(rewards[:quarter])
    if entropies[-1] < COLLAPSED * entropies[0] and gained <= RISEN * (max(rewards) - min(rewards)):
        lines.append(
            f"the entropy fell from {entropies[0]:.3g} to {entropies[-1]:.3g} nats, while the reward did not "
            f"rise ({fmean(rewards[:quarter]):.3g} to {fmean(rewards[-quarter:]):.3g})"
        )
    return lines


_FAILING_REWARDS = (
    "failed trajectories are not trained. Correct the reward. `millrace try-task CONFIG` calls it alone",
    "if the reward is only slow, raise `reward.timeout_s`. If it needs memory, raise `reward.memory_mb`",
)
_NO_SIGNAL = (
    "if the mean reward is near the lowest possible, the task is too hard: take easier rows, give partial "
    "credit, or start from `millrace sft`",
    "if it is near the highest possible, the task is learned or too easy: take harder rows",
    "if it is in between, make groups larger (`batch.group_size`), or raise `sampling.temperature`",
)
_RESAMPLE = "replace such groups by others as they come: set `algorithm.resample` to 3"
_DIVERGING = (
    "divide `optimizer.lr` by 10, raise `optimizer.warmup_steps`, or lower `optimizer.grad_clip`",
    "go back to an earlier checkpoint: later weights are damaged",
)
