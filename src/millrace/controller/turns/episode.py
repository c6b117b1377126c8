"""What the turns of an episode do to its trajectory."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from msgspec.structs import replace

from millrace.core.completion.forks import context, num_seen, num_shared
from millrace.core.types import Finish, Observed, Sampling, Scored, ScoreRequest, State, Trajectory, Work
from millrace.schedule.view import QueuedView

LANES = 64
"""Environments that one worker runs at once."""

UNANSWERED = (State.GENERATED, State.WAITING)
"""A reward worker has to score or to answer."""


def work(trajectory: Trajectory, prompt: array[int], sampling: Sampling, seed: int) -> Work:
    """The present lease. `sampling.max_tokens` bounds each turn. A `Work` counts from its prompt: all that
    precedes the present sequence."""
    ids = trajectory.trajectory_id, trajectory.group_id, trajectory.lease
    columns, begin = trajectory.columns, trajectory.columns.sequence_start
    if begin:  # with random numbers of its own
        prompt, seed = context(prompt, columns, columns.forks[-1]), seed ^ begin << 32
    if start := columns.turn_start - begin:
        sampling = replace(sampling, max_tokens=start + sampling.max_tokens)
    return Work(*ids, prompt, columns.tokens[begin:], sampling, seed, start)


def queued_view(trajectory: Trajectory, birth: int) -> QueuedView:
    """A turn that has no token may begin under any version that is not older than the turn before."""
    columns = trajectory.columns
    oldest = birth if columns.version_last is None else columns.version_last
    return QueuedView(columns.version_open, oldest)


def end_turn(trajectory: Trajectory, finish: Finish, *, answered: bool) -> None:
    """Generation has ended. `answered`: an environment answers turns. It answers no turn that was cut."""
    waits = answered and finish is Finish.STOP
    trajectory.state = State.WAITING if waits else State.GENERATED
    trajectory.finish = Finish.TURN if waits else finish


def request(trajectory: Trajectory, prompt: Sequence[int], *, max_sequence_tokens: int) -> ScoreRequest:
    """What an environment needs to answer the last turn."""
    columns, finish = trajectory.columns, trajectory.finish
    assert finish is not None, trajectory
    room = max_sequence_tokens - num_seen(columns.forks, len(columns), len(prompt))
    ids = trajectory.trajectory_id, trajectory.group_id
    return ScoreRequest(*ids, columns.tokens, finish, columns.turns(), room, len(prompt), columns.forks)


def observe(trajectory: Trajectory, answer: Observed, prompt: array[int]) -> None:
    """The trajectory goes on, with another turn."""
    columns, tokens = trajectory.columns, answer.tokens
    if answer.after is not None:
        kept = 0 if answer.after else num_shared(prompt, tokens[:-1])
        columns.fork(answer.after, kept)
        tokens = tokens[kept:]
    columns.observe(tokens)
    trajectory.state, trajectory.finish = State.QUEUED, None
    trajectory.metrics = trajectory.metrics | answer.metrics


def end_episode(trajectory: Trajectory, score: Scored) -> None:
    """The trajectory has its reward. Its metrics are those of all turns."""
    trajectory.state, trajectory.reward = State.SCORED, score.value
    trajectory.metrics = trajectory.metrics | score.metrics
    if score.truncated:
        trajectory.finish = Finish.LENGTH
    elif trajectory.finish is Finish.TURN:
        trajectory.finish = Finish.STOP
