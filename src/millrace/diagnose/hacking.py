"""A policy that is paid for another thing than its task: canaries earn, lengths explode, a string spreads."""

from __future__ import annotations

from statistics import fmean, median

from millrace.diagnose.evidence import CanaryReward, Evidence, Step
from millrace.diagnose.finding import Finding
from millrace.diagnose.shared_text import shared

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
