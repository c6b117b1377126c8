"""Episodes: budgets end them, answers take the time, turns are of no use, or an agent asks badly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from millrace.diagnose.evidence import Evidence, ScoredText
from millrace.diagnose.finding import Finding, ahead_key
from millrace.observe.conversation_times import CAUSES, ENDED_BY, FORKS, ended_by

STEPS_MIN, TEXTS_MIN, ANSWERS_MIN = 4, 16, 64
CUT = 0.95  # of the episodes of the later steps
BROKEN = 0.5  # of the turns of an episode
BROKEN_METRICS = "malformed", "tool_errors"
LONGER, WAITS = 4.0, 0.5
"""Answers take so many times as long as turns, and the trainer waits for this share of its time."""
FORKED, RETRIED, REFUSED = 0.2, 0.2, 0.5
"""Forks for one cause and retries, both by turns; refused calls of an episode."""


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
    keys = " or ".join(f"`{key}`" for key in (ahead_key(evidence), "batch.prompts") if key)
    return Finding("slow-environment", (line,), (f"let more episodes wait at once: raise {keys}", _WORKERS))


def forked_turns(evidence: Evidence) -> Finding | None:
    """A request of an agent that does not go on from an earlier one has all of its prompt computed again."""
    late = _with_turns(evidence, "forks_template")
    shares = {cause: _per_turn(late, f"{FORKS}{cause}") for cause in _FORKED} if late else {}
    lines = {
        cause: f"{share:.0%} of the turns of the last {len(late)} steps begin a sequence: {CAUSES[cause]}"
        for cause, share in shares.items()
        if share > FORKED
    }
    advice = tuple(_FORKED[cause] for cause in lines)
    return Finding("forked-turns", tuple(lines.values()), advice) if lines else None


def repeated_calls(evidence: Evidence) -> Finding | None:
    """The client of an agent gives up before the model has answered, and asks again."""
    late = _with_turns(evidence, "retries")
    if not late or (share := _per_turn(late, "retries")) <= RETRIED:
        return None
    line = f"agents sent {share:.2g} retries a turn, over the last {len(late)} steps"
    return Finding("repeated-calls", (line,), _RETRIED)


def refused_calls(evidence: Evidence) -> Finding | None:
    """The agent wants what the run cannot do. It lives on, so nothing else tells."""
    late = _with_turns(evidence, "calls_refused")
    if not late or (mean := fmean(step["calls_refused"] for step in late)) <= REFUSED:
        return None
    line = f"{mean:.2g} requests of each episode of the last {len(late)} steps were refused, in the mean"
    return Finding("refused-calls", (line,), _REFUSED)


def _with_turns(evidence: Evidence, name: str) -> list[dict[str, float]]:
    """The metrics of the later steps that have this one of agents. Empty: there are too few steps."""
    late = [step.reward_metrics for step in evidence.steps[len(evidence.steps) // 2 :]]
    late = [metrics for metrics in late if name in metrics and metrics.get("turns")]
    return late if len(late) >= STEPS_MIN else []


def _per_turn(steps: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(step.get(name, 0.0) for step in steps) / sum(step["turns"] for step in steps)


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
_FORKED = {
    "template": "take a chat template that keeps earlier messages as they were. This one drops or rewrites "
    "them, so no request goes on from the ids of the one before. `task.chat_arguments` may switch that off, "
    "and the model's `chat_template.jinja` can be edited",
    "history": "let the agent send its earlier messages unchanged, and append to them. An agent that cuts or "
    "sums up its history should do so seldom",
    "tools": "let the agent offer the same tools in the same order in each request: the chat template writes "
    "them before the messages",
}
"""Another conversation (`other`) is what a second agent has, and no fault."""
_RETRIED = (
    "the client's timeout is shorter than a turn takes: raise it, as in `OpenAI(timeout=3600)` or "
    "`Anthropic(timeout=3600)`. A retry costs no turn, but a client that has used up its retries fails the "
    "episode",
    "turns become shorter with more `rollout.replicas`, or with a smaller `sampling.max_tokens`",
)
_REFUSED = (
    "the error that the agent gets names the field: let the agent raise it, and `millrace try-task CONFIG "
    "--completion TEXT` shows it",
    "usual are more than one choice (`n`), a `response_format`, a forced call of a tool, and parts of "
    "messages that are no text: leave them out of the request",
)
