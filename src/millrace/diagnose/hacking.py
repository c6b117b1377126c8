"""A policy that is paid for another thing than its task.

Canaries earn, lengths explode, a string spreads, no test ran, or every completion earns the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from millrace.core.rounding import all_equal
from millrace.diagnose.evidence import CanaryReward, Evidence, Step
from millrace.diagnose.finding import Finding, few

SHOWN = 200  # characters of a text
FOLLOWS = 0.5  # a canary's rise, as a share of the rise of the training reward
CORRECT_MIN, CORRECT_MAX = 0.2, 0.6  # of a canary's completions: more than guesses of few, or of two answers
STEPS_MIN = 12  # fewer steps have no trend of lengths
TIMES, TOKENS_MIN = 2.0, 16  # shorter completions explode nowhere
CUT_MIN, CUT_RISE = 0.5, 0.3  # the share of truncated completions, and its rise
RISEN = 0.25  # a rise of the mean reward, as a share of its range
TEXTS_MIN = 8  # rows whose completions share a string
SHARED_MIN, SHARED_EARLY = 0.6, 0.1  # shares of the rewarded completions, late and early


def canary_rewarded(evidence: Evidence) -> Finding | None:
    lines = [
        line
        for name, series in evidence.canary_rewards.items()
        if series and (line := _canary(evidence, name, series))
    ]
    if not lines:
        return None
    texts = evidence.canary_texts
    lines += [f"row {one.row_id}: reward {one.reward:.3g} for {_shown(one.completion)}" for one in texts[:1]]
    if texts[1:]:
        lines.append(f"rewarded too: {', '.join(dict.fromkeys(one.row_id for one in texts[1:6]))}")
    return Finding("canary-rewarded", tuple(lines), _CANARY)


def _canary(evidence: Evidence, name: str, series: dict[int, CanaryReward]) -> str:
    """What is wrong with one canary; empty: nothing."""
    first, last = series[min(series)], series[max(series)]
    if evidence.canaries.get(name) == "rows":
        earned = [version for version, reward in series.items() if reward.earned]
        if not earned:
            return ""
        return (
            f"canary {name}: completions earned a reward, first at version {min(earned)}; the mean is "
            f"{last.mean:.3g} at version {max(series)}. None of its rows deserves one"
        )
    gain = _gain([step.reward_mean for step in evidence.steps])
    follows = last.low > first.high and last.mean - first.mean >= FOLLOWS * gain > 0
    if (follows and last.correct > CORRECT_MIN) or last.correct > CORRECT_MAX:
        return (
            f"canary {name}: the mean reward went from {first.mean:.3g} at version {min(series)} to "
            f"{last.mean:.3g} at version {max(series)}, for gold answers that are wrong; the training reward "
            f"changed by {gain:+.3g}"
        )
    return ""


def lengths_explode(evidence: Evidence) -> Finding | None:
    steps = [step for step in evidence.steps if step.batch is not None]
    if len(steps) < STEPS_MIN:
        return None
    quarter = len(steps) // 4
    early, late = (_length(part) for part in (steps[:quarter], steps[-quarter:]))
    cuts = [step.metrics.get("truncated", 0.0) for step in steps]
    cut, cut_before = fmean(cuts[-quarter:]), fmean(cuts[:quarter])
    rewards = [step.reward_mean for step in steps]
    stuck = _gain(rewards) <= RISEN * (max(rewards) - min(rewards))
    cut_short = cut >= CUT_MIN and cut - cut_before >= CUT_RISE
    if late < max(TIMES * early, TOKENS_MIN) or not (stuck or cut_short):
        return None
    line = (
        f"completions grew from {early:.3g} to {late:.3g} tokens, and the truncated share from "
        f"{cut_before:.0%} to {cut:.0%}; the reward changed by {_gain(rewards):+.3g}"
    )
    return Finding("lengths-explode", (line,), _LENGTHS)


def shared_string(evidence: Evidence) -> Finding | None:
    """A form that the policy has learned is in unpaid completions too; a string that is paid for is not."""
    late, early, unpaid = (
        [(one.completion, one.prompt) for one in texts]
        for texts in (evidence.late_texts, evidence.early_texts, evidence.unpaid_texts)
    )
    if min(len(late), len(early)) < TEXTS_MIN:
        return None
    found = shared(late, early, unpaid, SHARED_MIN)
    proven = len(unpaid) < TEXTS_MIN or found.unpaid <= found.late / 2
    if not found.string or found.early > SHARED_EARLY or not proven:
        return None
    line = (
        f"{found.late:.0%} of {len(late)} late rewarded completions, each of another row, have "
        f"{_shown(found.string)}, which their prompts have not; of the early ones {found.early:.0%}"
    )
    return Finding("shared-string", (line,), _SHARED)


def _length(steps: list[Step]) -> float:
    return median(step.batch.lengths.mean for step in steps if step.batch is not None)


def _gain(rewards: list[float]) -> float:
    """From the first quarter of the steps to the last."""
    quarter = max(1, len(rewards) // 4)
    return fmean(rewards[-quarter:]) - fmean(rewards[:quarter]) if rewards else 0.0


def _shown(text: str) -> str:
    return repr(text) if len(text) <= SHOWN else f"{text[:SHOWN]!r}..."


_CANARY = (
    "the reward pays for something else than the answer: read the completion, then mend the reward so that "
    "it earns nothing. `millrace try-task CONFIG --completion TEXT` calls it alone",
    "later versions have learned the hack: start again from a model from before",
)
_LENGTHS = (
    "look whether longer completions earn more: `millrace show RUN --best`. Mend a reward that anything "
    "in a long text satisfies, or lower `sampling.max_tokens`",
)
_SHARED = (
    "look whether the reward pays for the string: `millrace try-task CONFIG --completion TEXT`. If the "
    "task asks for it, as for a fixed form, all is well",
)


WINDOW = 40  # characters; shorter strings are phrases of any language
READ = 2_000  # characters of each end of a text

Pair = tuple[str, str]
"""A completion and its prompt. White space counts as one blank."""


@dataclass(frozen=True, slots=True)
class SharedString:
    """`late`, `early` and `unpaid`: the shares of these completions that have it, or its rarest window."""

    string: str
    late: float
    early: float
    unpaid: float


def shared(late: Sequence[Pair], early: Sequence[Pair], unpaid: Sequence[Pair], least: float) -> SharedString:
    """Of the windows of `WINDOW` characters that at least the share `least` of `late` has, the one that is
    the rarest in `early`, and as much around it as is shared so. What a completion repeats of its own prompt
    does not count.

    Degenerate:
        No such window -> an empty string, shares of 0.
    """
    texts = [_read(pair) for pair in late]
    counts = _counts(texts)
    common = {window for window, num in counts.items() if num >= least * len(texts)}
    if not common:
        return SharedString("", 0.0, 0.0, 0.0)
    before, other = (_counts([_read(pair) for pair in pairs], common) for pairs in (early, unpaid))
    best = min(common, key=lambda window: (before[window], -counts[window], window))
    example = next(completion for completion, prompt in texts if best in completion and best not in prompt)
    return SharedString(
        _extended(best, example, common),
        late=counts[best] / len(late),
        early=before[best] / max(1, len(early)),
        unpaid=other[best] / max(1, len(unpaid)),
    )


def _counts(texts: Sequence[Pair], only: set[str] | None = None) -> Counter[str]:
    """For each window the number of completions that have it, and whose prompt has not."""
    counts = Counter[str]()
    for completion, prompt in texts:
        windows = {completion[at : at + WINDOW] for at in range(len(completion) - WINDOW + 1)}
        counts.update(window for window in windows if (not only or window in only) and window not in prompt)
    return counts


def _extended(window: str, text: str, common: set[str]) -> str:
    """The longest part of `text` around `window` whose every window is common."""
    first = last = text.index(window)
    while first > 0 and text[first - 1 : first - 1 + WINDOW] in common:
        first -= 1
    while last + WINDOW < len(text) and text[last + 1 : last + 1 + WINDOW] in common:
        last += 1
    return text[first : last + WINDOW]


def _read(pair: Pair) -> Pair:
    completion, prompt = (" ".join(text.split()) for text in pair)
    ends = completion if len(completion) <= 2 * READ else completion[:READ] + completion[-READ:]
    return ends, prompt


TESTS_RUN = "tests_run"
NUM_MIN, CONSTANT_STEPS_MIN = 64, 4
ENTROPY_MIN = 0.05  # nats; below, the completions of a prompt are nearly equal


def tests_not_run(evidence: Evidence) -> Finding | None:
    versions = [step.version for step in evidence.steps if any(_unproven(step))]
    texts = [*evidence.early_texts, *evidence.late_texts]
    rows = [one.row_id for one in texts if one.metrics.get(TESTS_RUN) == 0]
    lines = []
    if versions:
        lines.append(f"in the steps of {few(versions, 'version')} rewards are above 0, and no test ran")
    if rows:
        lines.append(f"{len(rows)} of {len(texts)} rewarded completions had no test run; first: {rows[0]}")
    return Finding("tests-not-run", tuple(lines), _NOT_RUN) if lines else None


def _unproven(step: Step) -> Iterator[bool]:
    """For the reward, and for each member of a sum that counts its tests."""
    for name, num in step.reward_metrics.items():
        if name == TESTS_RUN:
            yield num == 0 < step.reward_mean
        elif name.endswith(f"/{TESTS_RUN}"):
            yield num == 0 < step.reward_metrics.get(name.removesuffix(f"/{TESTS_RUN}"), 0.0)


def constant_reward(evidence: Evidence) -> Finding | None:
    """Rewards of 0 throughout are left to `no-signal`: a task that is too hard has them too."""
    rewards, steps = evidence.rewards, evidence.steps
    if rewards.num < NUM_MIN or len(steps) < CONSTANT_STEPS_MIN:
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
