"""A verifier that does not verify: it pays without a test, or pays the same for everything."""

from __future__ import annotations

from collections.abc import Iterator

from millrace.core.rounding import all_equal
from millrace.diagnose.evidence import Evidence, Step
from millrace.diagnose.finding import Finding, few

RUN = "tests_run"
NUM_MIN, STEPS_MIN = 64, 4
ENTROPY_MIN = 0.05  # nats; below, the completions of a prompt are nearly equal


def tests_not_run(evidence: Evidence) -> Finding | None:
    versions = [step.version for step in evidence.steps if any(_unproven(step))]
    texts = [*evidence.early_texts, *evidence.late_texts]
    rows = [one.row_id for one in texts if one.metrics.get(RUN) == 0]
    lines = []
    if versions:
        lines.append(f"in the steps of {few(versions, 'version')} rewards are above 0, and no test ran")
    if rows:
        lines.append(f"{len(rows)} of {len(texts)} rewarded completions had no test run; first: {rows[0]}")
    return Finding("tests-not-run", tuple(lines), _NOT_RUN) if lines else None


def _unproven(step: Step) -> Iterator[bool]:
    """For the reward, and for each member of a sum that counts its tests."""
    for name, num in step.reward_metrics.items():
        if name == RUN:
            yield num == 0 < step.reward_mean
        elif name.endswith(f"/{RUN}"):
            yield num == 0 < step.reward_metrics.get(name.removesuffix(f"/{RUN}"), 0.0)


def constant_reward(evidence: Evidence) -> Finding | None:
    """Rewards of 0 throughout are left to `no-signal`: a task that is too hard has them too."""
    rewards, steps = evidence.rewards, evidence.steps
    if rewards.num < NUM_MIN or len(steps) < STEPS_MIN:
        return None
    constant = rewards.low > 0 and all_equal((rewards.low, rewards.high))
    if not constant or steps[0].metrics.get("entropy", 1.0) < ENTROPY_MIN:
        return None
    line = f"all {rewards.num} rewards are {rewards.low:.3g}, from the first step on"
    return Finding("constant-reward", (line,), _CONSTANT)


_NOT_RUN = (
    "the verifier pays without a test. Make it raise if it ran none: a failure is counted, and not trained",
)
_CONSTANT = (
    "`millrace try-task CONFIG` gives the reward an empty text and garbage: both should earn less. Look "
    "whether the verifier ever compares, or calls its tests",
    "if they do earn less, the model solves every row already: take harder rows",
)
