"""Plays one episode of an environment with given actions, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millrace.config.schema import Config
from millrace.controller import episode
from millrace.core.completion.columns import TokenColumns, token_array
from millrace.core.completion.forks import context
from millrace.core.errors import DataError
from millrace.core.types import Abstain, Failed, Finish, Observed, Scored, Trajectory
from millrace.evaluation import scoring


def play(config: Config, actions: Sequence[str]) -> dict[str, Any]:
    """One episode on the first usable row, as JSON types, in the reward worker of a run.

    `turns`: each with the action, the answer, their tokens, and the reward of the turn or None. `outcome`:
    "scored", "failed", "abstain", or "observed" if the actions are used up before the episode ends.
    """
    from millrace.conversations.tokenizer import load_dated_tokenizer

    tokenizer = load_dated_tokenizer(config.model.path, config.model.date)
    prompt = scoring.prompts(config, 1)[0]
    one = Trajectory(0, prompt.group_id)
    turns: list[dict[str, Any]] = []
    end: Any = Observed(token_array())
    most = config.rollout.max_sequence_tokens
    asked = prompt.tokens, prompt.row_digest
    with scoring.Scorer(config) as scorer:
        if config.own_prompts:
            episode.begin(one)
            begun = scorer.scores([episode.request(one, *asked, max_sequence_tokens=most)])[0].score
            if not isinstance(begun, Observed):
                raise DataError(f"{prompt.row_id}: {getattr(begun, 'reason', begun)}")
            episode.observe(one, begun)
        for action in actions:
            sampled = [*tokenizer.encode(action, add_special_tokens=False), tokenizer.eos_token_id]
            one.columns.extend(TokenColumns.of(sampled, [0.0] * len(sampled), 0))
            episode.end_turn(one, Finish.STOP, answered=True)
            timed = scorer.scores([episode.request(one, *asked, max_sequence_tokens=most)])[0]
            end = timed.score
            observed = list(end.tokens) if isinstance(end, Observed) else []
            if isinstance(end, Observed):
                episode.observe(one, end)
            turns.append(
                {
                    "action": action,
                    "action_tokens": sampled,
                    "answer": tokenizer.decode(observed),
                    "answer_tokens": observed,
                    "reward": getattr(end, "metrics", {}).get(f"turn_{len(turns) + 1}"),
                    "seconds": timed.seconds,
                }
            )
            if not isinstance(end, Observed):
                break
    seen = context(prompt.tokens, one.columns.tokens, one.columns.forks, one.columns.prompt_end)
    return {
        "row": prompt.row_id,
        "prompt": tokenizer.decode(seen) if one.columns.prompt_end else prompt.text,
        "prompt_tokens": list(seen),
        "turns": turns,
        "outcome": type(end).__name__.lower(),
        "value": end.value if isinstance(end, Scored) else None,
        "metrics": getattr(end, "metrics", {}),
        "reason": end.reason if isinstance(end, Failed | Abstain) else "",
    }
