"""How many tokens of a batch still count after importance weights and clips."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from millrace.diagnose import keys
from millrace.diagnose.evidence import Evidence, Step
from millrace.diagnose.finding import Finding

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
    bound = keys.bound(evidence)
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
