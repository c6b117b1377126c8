"""Episodes with an environment: budgets end them, answers take the time, or most turns are of no use."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from millrace.observe.conversation import ENDED_BY, ended_by
from millrace.observe.doctor.evidence import Evidence, ScoredText
from millrace.observe.doctor.finding import Finding
from millrace.observe.doctor.keys import ahead

STEPS_MIN, TEXTS_MIN, ANSWERS_MIN = 4, 16, 64
CUT = 0.95  # of the episodes of the later steps
BROKEN = 0.5  # of the turns of an episode
BROKEN_METRICS = "malformed", "tool_errors"
LONGER, WAITS = 4.0, 0.5
"""Answers take so many times as long as turns, and the trainer waits for this share of its time."""


def episodes_cut(evidence: Evidence) -> Finding | None:
    late = evidence.steps[len(evidence.steps) // 2 :]
    budgets = [cut for step in late if (cut := _budgets(step.reward_metrics))]
    if len(budgets) < STEPS_MIN or (share := fmean(sum(cut.values()) for cut in budgets)) < CUT:
        return None
    shares = {name: fmean(cut.get(name, 0.0) for cut in budgets) for name in budgets[0]}
    most = max(shares, key=lambda name: shares[name])
    line = (
        f"{share:.0%} of the episodes of the last {len(late)} steps were ended by a budget, "
        f"{shares[most]:.0%} by that of {most}"
    )
    return Finding("episodes-cut", (line,), (_LONGER.get(most, "raise it"), _NO_END))


def rewarded_cut(evidence: Evidence) -> Finding | None:
    """A reward that comes only where a budget ended the episode pays for not ending it."""
    texts = [text for text in evidence.late_texts if _budgets(text.metrics)]
    whole = [text for text in evidence.unpaid_texts if _budgets(text.metrics) and not ended_by(text.metrics)]
    if len(texts) < TEXTS_MIN or not whole or not all(ended_by(text.metrics) for text in texts):
        return None
    line = (
        f"each of {len(texts)} rewarded episodes was ended by a budget, and {len(whole)} that their "
        f"environment ended earned less; first: row {texts[0].row_id}"
    )
    return Finding("rewarded-cut", (line,), _REWARDED_CUT)


def broken_turns(evidence: Evidence) -> Finding | None:
    """The metrics count turns. An episode without them has none."""
    texts = [text for text in [*evidence.late_texts, *evidence.unpaid_texts] if text.metrics.get("turns")]
    if len(texts) < TEXTS_MIN:
        return None
    shares = {name: fmean(_share(text, name) for text in texts) for name in BROKEN_METRICS}
    lines = [
        f"`{name}` counts {share:.0%} of the turns of {len(texts)} episodes"
        for name, share in shares.items()
        if share > BROKEN
    ]
    return Finding("broken-turns", tuple(lines), _BROKEN) if lines else None


def slow_environment(evidence: Evidence) -> Finding | None:
    """Long answers cost nothing while other episodes keep the trainer busy."""
    use, late = evidence.environment, evidence.steps[len(evidence.steps) // 2 :]
    batches = [step.batch for step in late if step.batch is not None and not step.batch.replayed]
    if use.num_answers < ANSWERS_MIN or len(batches) < STEPS_MIN or use.answer_s < LONGER * use.turn_s:
        return None
    waited_s = sum(batch.wait_s for batch in batches)
    share = waited_s / max(waited_s + sum(batch.step_s for batch in batches), 1e-9)
    if share < WAITS:
        return None
    line = (
        f"{use.num_answers} turns waited {use.answer_s / use.num_answers:.2g} s each for an answer, "
        f"{use.answer_s / max(use.turn_s, 1e-9):.0f} times as long as the replicas took for turns. The "
        f"trainer waits {share:.0%} of its time"
    )
    keys = " or ".join(f"`{key}`" for key in (ahead(evidence), "batch.prompts") if key)
    return Finding("slow-environment", (line,), (f"let more episodes wait at once: raise {keys}", _WORKERS))


def _budgets(metrics: Mapping[str, float]) -> dict[str, float]:
    """For each budget whether it ended the episode, or the share of the episodes."""
    return {
        name.removeprefix(ENDED_BY): value for name, value in metrics.items() if name.startswith(ENDED_BY)
    }


def _share(text: ScoredText, name: str) -> float:
    return min(1.0, text.metrics.get(name, 0.0) / text.metrics["turns"])


_LONGER = {
    "tokens": "raise `sampling.max_tokens`: it ends a turn, and with it the episode",
    "turns": "raise `reward.turns`",
    "tool_calls": "raise `reward.tool_calls`",
    "sampled": "raise `reward.episode_tokens`",
    "seconds": "raise `reward.episode_s`, or make answers faster",
    "context": "raise `rollout.max_sequence_tokens`, or make observations shorter",
}
_NO_END = (
    "look with `millrace show RUN --samples` whether the model can end an episode: it needs its end token, "
    "and the environment needs a `Done`"
)
_REWARDED_CUT = (
    "the model learns not to end an episode. Give the reward of a turn in that turn, or the whole reward "
    "only with `Done`",
)
_BROKEN = (
    "look with `millrace show RUN --samples` what the model writes: the prompt may not say the form, or the "
    "environment may read it too strictly",
    "start from a model that knows the form: `millrace sft`",
)
_WORKERS = (
    "more workers answer more turns at once: raise `reward.workers`. If few answers are very long, lower "
    "`reward.timeout_s`"
)
