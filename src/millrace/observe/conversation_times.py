"""An episode as a conversation: the turns of the model, the answers between them, and their rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.core.completion.columns import OBSERVED, TokenColumns
from millrace.core.completion.forks import continued

MODEL, ENVIRONMENT, PROMPT = "model", "environment", "prompt"
ENDED_BY = "ended_by_"
FORKS = "forks_"
CAUSES = {
    "history": "rewritten history",
    "tools": "other tools",
    "template": "rewriting template",
    "other": "another conversation",
}
"""Why an agent's call begins a sequence, in words. The metrics `forks_CAUSE` of a trajectory count them."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens `start` to `stop` of a completion. An answer of the environment has the number of the turn that
    it answers. Turn 0 is the end of a prompt of its own. `versions` sampled the tokens, in ascending order;
    empty: they are observed. `reward` is of the model's turn. `after`: the answer begins another sequence,
    and follows the turn of this number; 0: it stands in place of the prompt; None: it goes on. `sequence`:
    its number, as `algorithm.sequence_share` counts (`core.completion.forks.continued`), from 1 on. `causes`:
    why it begins a sequence. Several: the record does not tell which of them. None: the record does not
    know."""

    number: int
    role: str
    start: int
    stop: int
    versions: tuple[int, ...]
    reward: float | None
    after: int | None = None
    sequence: int = 1
    causes: tuple[str, ...] = ()


def turns_of(columns: TokenColumns, metrics: Mapping[str, float]) -> list[Turn]:
    """The turns of an episode in order. `metrics` are those of its reward. Empty: no environment answered, so
    the completion is one text."""
    if columns.sampled() is None and not any(name.startswith(ENDED_BY) for name in metrics):
        return []
    turns, number, forks = list[Turn](), 0, {fork.start: fork for fork in columns.forks}
    numbers = continued(columns.forks, len(columns))
    begins = {fork.start: number for fork, (number, _) in zip(columns.forks, numbers[1:], strict=True)}
    causes, sequence = _causes(columns, metrics), 0
    for start, stop, sampled in columns.turns():
        number += sampled
        versions = sorted({version for version, _ in columns[start:stop].sampled_runs})
        reward = metrics.get(f"turn_{number}") if sampled else None
        role = MODEL if sampled else ENVIRONMENT if start or number else PROMPT
        fork = forks.get(start)
        after = fork and sum(one.role == MODEL and one.stop <= fork.after for one in turns)
        sequence = begins.get(start, sequence)
        why = causes.get(start, ())
        turns.append(Turn(number, role, start, stop, tuple(versions), reward, after, sequence + 1, why))
    return turns


def _causes(columns: TokenColumns, metrics: Mapping[str, float]) -> dict[int, tuple[str, ...]]:
    """The causes of sequences that stand in place of the prompt, by the first token of each. The metrics
    count a sequence when its first turn is complete. So the newest may have no cause yet."""
    counts = {cause: round(metrics.get(f"{FORKS}{cause}", 0)) for cause in CAUSES}
    begins = [fork.start for fork in columns.forks if fork.start and not fork.after]
    causes = tuple(cause for cause, count in counts.items() if count)
    return dict.fromkeys(begins[: sum(counts.values())], causes)


def conversation(
    columns: TokenColumns, metrics: Mapping[str, float], decode: Callable[[Sequence[int]], str] | None
) -> list[dict[str, Any]]:
    """`turns_of` as plain JSON types, with the text of each turn. `decode` None: there are no texts."""
    return [
        {
            "turn": turn.number,
            "role": turn.role,
            "tokens": turn.stop - turn.start,
            "versions": list(turn.versions),
            "reward": turn.reward,
            "after": turn.after,
            "sequence": turn.sequence,
            "causes": list(turn.causes),
            "text": decode(columns.tokens[turn.start : turn.stop].tolist()) if decode else None,
        }
        for turn in turns_of(columns, metrics)
    ]


def ended_by(metrics: Mapping[str, float]) -> str:
    """The budget that ended an episode, as `turns`; empty: none did."""
    ended = (name for name, value in metrics.items() if name.startswith(ENDED_BY) and value == 1)
    return next(ended, "").removeprefix(ENDED_BY)


def sampled_tokens(columns: TokenColumns) -> list[int]:
    """The ids that the model wrote, without the answers between its turns."""
    if columns.sampled() is None:
        return columns.tokens.tolist()
    own = [columns.tokens[start:stop] for start, stop, sampled in columns.turns() if sampled]
    return [token for tokens in own for token in tokens]


def recorded(columns: TokenColumns) -> tuple[list[float | None], list[int | None]]:
    """The log-prob and the version of every token; None: the token is observed."""
    versions = [None if version == OBSERVED else version for version in columns.versions()]
    pairs = zip(columns.logprobs, versions, strict=True)
    return [None if version is None else logprob for logprob, version in pairs], versions
