"""Plays one episode of an environment with given actions, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millrace.config.schema import Config
from millrace.core.completion.columns import token_array
from millrace.core.types import ENVIRONMENT_S, Abstain, Failed, Finish, Observed, Scored, ScoreRequest
from millrace.evaluation import scores


def play(config: Config, actions: Sequence[str]) -> dict[str, Any]:
    """One episode on the first usable row, as JSON types, in the reward worker of a run.

    `turns`: each with the action, the answer, their tokens, and the reward of the turn or None. `outcome`:
    "scored", "failed", "abstain", or "observed" if the actions are used up before the episode ends.
    """
    from millrace.environments.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.model.path)
    prompt = scores.prompts(config, 1)[0]
    tokens: list[int] = []
    stretches: list[tuple[int, int, bool]] = []
    turns: list[dict[str, Any]] = []
    end: Any = Observed(token_array([]))
    with scores.Scorer(config) as scorer:
        for action in actions:
            sampled = [*tokenizer.encode(action, add_special_tokens=False), tokenizer.eos_token_id]
            tokens, stretches = _grown(tokens, stretches, sampled, True)
            room = config.rollout.max_sequence_tokens - len(prompt.tokens) - len(tokens)
            spent_s = getattr(end, "metrics", {}).get(ENVIRONMENT_S, 0.0)
            request = ScoreRequest(
                0, prompt.group_id, token_array(tokens), Finish.TURN, stretches, room, spent_s
            )
            timed = scorer.scores([request])[0]
            end = timed.score
            observed = list(end.tokens) if isinstance(end, Observed) else []
            tokens, stretches = _grown(tokens, stretches, observed, False)
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
    return {
        "row": prompt.row_id,
        "prompt": prompt.text,
        "prompt_tokens": list(prompt.tokens),
        "turns": turns,
        "outcome": type(end).__name__.lower(),
        "value": end.value if isinstance(end, Scored) else None,
        "metrics": getattr(end, "metrics", {}),
        "reason": end.reason if isinstance(end, Failed | Abstain) else "",
    }


def _grown(
    tokens: list[int], stretches: list[tuple[int, int, bool]], more: list[int], sampled: bool
) -> tuple[list[int], list[tuple[int, int, bool]]]:
    if not more:
        return tokens, stretches
    return [*tokens, *more], [*stretches, (len(tokens), len(tokens) + len(more), sampled)]
