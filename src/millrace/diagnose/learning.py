"""Why a run with right weights learns nothing, or the wrong thing.

Its rewards fail, its groups are all equal, it diverges, few tokens of a batch count, or it learns its rows
instead of the task. Or its schedule makes batches unfair, or older than needed. These two rules read steps
alone, and the advice names the key by which the schedule in use runs ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt
from statistics import fmean, median

from millrace.core.fairness import BAND, BATCHES, LengthMoments, fairness, next_correlation, windows
from millrace.diagnose.evidence import Accuracy, BatchFigures, Evidence, Step
from millrace.diagnose.finding import Finding, ahead_key, bound_key

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


EFFECTIVE_MIN = 0.3  # of the tokens: with less, a few of them make the step
SILENCED_MAX = 0.6  # of the tokens with an advantage
AGE = "ess_age_"


def few_effective_tokens(evidence: Evidence) -> Finding | None:
    late = evidence.steps[len(evidence.steps) // 2 :]
    effective = _mean(late, "ess")
    if effective is None or effective >= EFFECTIVE_MIN:
        return None
    ages = sorted({int(name.removeprefix(AGE)) for s in late for name in s.metrics if name.startswith(AGE)})
    lines = [f"weighted by importance, {effective:.0%} of the tokens are effective (metric `ess`)"]
    by_age = [f"{_mean(late, f'{AGE}{age}'):.0%} from {age} on" for age in ages]
    lines += [f"by staleness: {', '.join(by_age)}"] if by_age else []
    return Finding("few-effective-tokens", tuple(lines), tuple(_closer(evidence)))


def silenced_tokens(evidence: Evidence) -> Finding | None:
    late = evidence.steps[len(evidence.steps) // 2 :]
    silenced = _mean(late, "silenced")
    if silenced is None or silenced <= SILENCED_MAX:
        return None
    line = f"{silenced:.0%} of the tokens with an advantage have no gradient: clips or masks remove it"
    return Finding("silenced-tokens", (line,), tuple(_louder(evidence)))


def _closer(evidence: Evidence) -> Iterator[str]:
    bound = bound_key(evidence)
    yield f"lower the bound on staleness (`{bound}`) or `optimizer.lr`" if bound else "lower `optimizer.lr`"
    if evidence.algorithm != "function":
        yield "leave out the tokens that are furthest away: set `algorithm.second_moment` to 0.04"


def _louder(evidence: Evidence) -> Iterator[str]:
    yield "make fewer steps of a batch (`batch.epochs`, `batch.minibatches`), or lower `optimizer.lr`"
    if evidence.algorithm != "function":
        yield "widen the bounds: `algorithm.clip_low` and `algorithm.clip_high`, or those of the correction"


def _mean(steps: list[Step], name: str) -> float | None:
    values = [step.metrics[name] for step in steps if name in step.metrics]
    return fmean(values) if values else None


# ---------------------------------------------------------------- unfair and late batches


ERRORS = 2.0  # standard errors beyond the band
WAITING_STEPS_MIN = 16  # with fewer steps the share of waiting is noise
WAITS_MAX = 0.05  # of its time: a trainer that waits less is the slower side
READY_MIN = 1.5  # batches that wait at the end of a step; the next one is needed, more are early
STALE_MIN = 1.0
SPREAD_MIN = 0.2  # of the mean: lengths that differ by less count as equal
DRIFT = 0.5  # correlation of neighbouring batches, 2.8 standard errors above that of random ones


def unfair_batches(evidence: Evidence) -> Finding | None:
    """The mean fairness over windows, so that lengths may drift from one window to the next.

    Windows of nearly equal lengths are left out: a policy that learns fast changes all lengths from step to
    step by more than groups differ, so the choice of groups does not matter. Windows with similar neighbours
    are left out too: there the policy learns another length. A schedule that trains the first ready groups
    makes neighbours differ.
    """
    clear = [
        window
        for window in windows([batch.lengths for batch in _batches(evidence)])
        if _spread(window) >= SPREAD_MIN and not _drifts(window)
    ]
    values = [value for window in clear if (value := fairness(window)) is not None]
    if not values:
        return None
    mean, error = fmean(values), sqrt(2 / (BATCHES - 1) / len(values))
    low, high = BAND
    if low - ERRORS * error <= mean <= high + ERRORS * error:
        return None
    batches = BATCHES * len(values)
    line = (
        f"over the last {batches} batches fairness is {mean:.2f}. Random batches of the same groups have 1, "
        f"with a standard error of {error:.2f}. Values of {low} to {high} are usual"
    )
    if mean < low:
        return Finding("unfair-batches", (line,), _TOO_EVEN)
    key = ahead_key(evidence)
    lower = [f"lower `{key}`: then fewer batches are in flight, and fewer are overtaken"] if key else []
    return Finding("unfair-batches", (line,), (_SWINGS, *lower))


def needless_staleness(evidence: Evidence) -> Finding | None:
    """The trainer is the slower side, and complete batches wait for it: they get older for nothing."""
    batches = [batch for batch in _batches(evidence) if not batch.replayed]
    late = batches[len(batches) // 2 :]
    if len(late) < WAITING_STEPS_MIN:
        return None
    waited_s, stepped_s = sum(b.wait_s for b in late), sum(b.step_s for b in late)
    waits = waited_s / max(waited_s + stepped_s, 1e-9)
    ready = fmean(b.groups_ready / b.lengths.groups for b in late)
    staleness = fmean(b.staleness_mean for b in late)
    if waits > WAITS_MAX or ready < READY_MIN or staleness < STALE_MIN:
        return None
    line = (
        f"in the last {len(late)} steps the trainer waited {waits:.0%} of the time. At the end of a step "
        f"{ready:.1f} batches were ready. The mean staleness is {staleness:.2f}"
    )
    key = ahead_key(evidence)
    lower = [f"lower `{key}` by one: generation is ahead, so the trainer loses nothing"] if key else []
    advice = (
        *lower,
        "or give the trainer devices or cores that the replicas do not need",
    )
    return Finding("needless-staleness", (line,), advice)


def _batches(evidence: Evidence) -> list[BatchFigures]:
    return [step.batch for step in evidence.steps if step.batch is not None]


def _spread(batches: Sequence[LengthMoments]) -> float:
    """The standard deviation of group lengths over their mean."""
    num = sum(batch.groups for batch in batches)
    mean = sum(batch.groups * batch.mean for batch in batches) / num
    squares = sum(batch.groups * (batch.std**2 + (batch.mean - mean) ** 2) for batch in batches)
    return sqrt(squares / num) / mean if mean else 0.0


def _drifts(batches: Sequence[LengthMoments]) -> bool:
    correlation = next_correlation(batches)
    return correlation is not None and correlation > DRIFT


_SWINGS = (
    "short completions are trained together, and long completions together. So rewards rise and fall with "
    "the lengths, and easy batches have little signal"
)
_TOO_EVEN = (
    "batches are more alike than random batches: the order of the rows repeats the same lengths, or your own "
    "schedule chooses groups by length",
)
