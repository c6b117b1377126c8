"""The request and the answer of a turn as built-in values, for the way between two processes.

Each turn has one of each, in messages of their own. For each message pickle looks up the classes of all that
is no built-in value, and an array costs it as much as a struct: four times the time.
"""

from __future__ import annotations

from array import array
from typing import Any

from millrace.core.completion.forks import Fork
from millrace.core.turns.turn_bounds import NO_BOUNDS, TurnBounds
from millrace.core.types import Observed, Score, ScoreRequest

PackedRequest = tuple[Any, ...]


def pack_request(request: ScoreRequest) -> PackedRequest:
    return (
        (request.trajectory_id, request.group_id),
        (request.tokens.tobytes(), request.logprobs.tobytes(), request.prompt.tobytes()),
        (request.finish, request.turns, request.room, request.spent_s),
        ([tuple(fork) for fork in request.forks], request.row_digest, request.begins, request.known),
    )


def unpack_request(packed: PackedRequest) -> ScoreRequest:
    ids, (tokens, logprobs, prompt), turn, (forks, *rest) = packed
    begin, sampled = array("i", prompt), array("f", logprobs)
    values = *ids, array("i", tokens), *turn, begin, [Fork(*fork) for fork in forks], sampled, *rest
    return ScoreRequest(*values)


def pack_answer(answer: Score | Observed | None) -> Any:
    """A score comes once in an episode, and stays as it is."""
    if not isinstance(answer, Observed):
        return answer
    bounds = None if answer.bounds == NO_BOUNDS else tuple(answer.bounds)
    return answer.tokens.tobytes(), answer.metrics, answer.after, answer.kept, bounds, answer.begins


def unpack_answer(packed: Any) -> Score | Observed:
    """Of an answer that is there."""
    if type(packed) is not tuple:
        answer: Score = packed
        return answer
    tokens, metrics, after, kept, bounds, begins = packed
    present = TurnBounds(*bounds) if bounds else NO_BOUNDS
    return Observed(array("i", tokens), metrics, after, kept, present, begins)
