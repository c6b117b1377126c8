"""What the turns of an episode do to its trajectory."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec.structs import replace

from millrace.core.completion.columns import OBSERVED, TokenColumns
from millrace.core.completion.forks import context, num_seen
from millrace.core.errors import DataError
from millrace.core.turns.turn_bounds import ENVIRONMENT_S, NO_BOUNDS, UNBOUNDED, EpisodeBounds, TurnBounds
from millrace.core.types import (
    Finish,
    Observed,
    Progress,
    Sampling,
    Scored,
    ScoreRequest,
    State,
    Trajectory,
    Work,
)
from millrace.schedule.view import QueuedView

LANES = 64
"""Environments that one worker runs at once."""

UNANSWERED = (State.GENERATED, State.WAITING)
"""A reward worker has to score or to answer."""

GOING_ON = (State.QUEUED, State.LEASED)


class Incarnation(Protocol):
    """A process of a replica, as its record has it."""

    alive: bool
    epoch: int


def answered(changed: Sequence[Trajectory]) -> list[int]:
    """Which of the trajectories need no reward worker any more: they have a reward, or have ended."""
    return [one.trajectory_id for one in changed if one.state not in (*UNANSWERED, *GOING_ON)]


def work(
    trajectory: Trajectory, prompt: array[int], sampling: Sampling, seed: int, episode_tokens: int
) -> Work:
    """The present lease. `sampling.max_tokens` bounds each turn, `episode_tokens` all turns together (0: it
    does not). The bounds of the present turn may be tighter. A `Work` counts from its prompt: all that
    precedes what the present sequence samples."""
    ids = trajectory.trajectory_id, trajectory.group_id, trajectory.lease
    columns, begin, most = trajectory.columns, trajectory.columns.sequence_start, sampling.max_tokens
    turn_start = columns.turn_start
    if episode_tokens:
        sampled = sum([count for version, count in columns.runs if version != OBSERVED])
        most = max(1, min(most, episode_tokens - sampled + len(columns) - turn_start))
    bounds = bounds_of(trajectory)
    if bounds.max_tokens:
        most = max(1, min(most, bounds.max_tokens))
    if bounds.stop or bounds.stop_ids:
        ends = {"stop_token_ids": (*sampling.stop_token_ids, *bounds.stop_ids)}
        sampling = replace(sampling, stop=(*sampling.stop, *bounds.stop), **ends)
    if begin:  # with random numbers of its own
        prompt, seed = context(prompt, columns.tokens, columns.forks, begin), seed ^ begin << 32
    start = turn_start - begin
    if start + most != sampling.max_tokens:
        sampling = replace(sampling, max_tokens=start + most)
    return Work(*ids, prompt, columns.tokens[begin:], sampling, seed, start)


def bounds_of(trajectory: Trajectory) -> TurnBounds:
    """What the request of the present turn asks, until the episode ends."""
    if trajectory.bounds == UNBOUNDED:
        return NO_BOUNDS
    return trajectory.bounds.first if in_first_turn(trajectory) else trajectory.bounds.next


def in_first_turn(trajectory: Trajectory) -> bool:
    return trajectory.columns.turn_start == trajectory.columns.prompt_end


def extend(trajectory: Trajectory, progress: Progress, worker: str) -> None:
    """Append the tokens that `worker` reports of the present lease. Tokens that are here already change
    nothing.

    Raises: DataError: a gap, which a lossless stream cannot have.
    """
    columns = trajectory.columns
    num_known = len(columns) - columns.sequence_start
    if progress.start > num_known:
        raise DataError(
            f"trajectory {trajectory.trajectory_id}: {worker} reports tokens from {progress.start}, but only "
            f"{num_known} are known: {progress.start - num_known} are missing"
        )
    new = num_known - progress.start
    columns.extend(progress.columns[new:] if new else progress.columns)


def bound_to(trajectory: Trajectory, *, one_version: bool) -> int | None:
    """The version under which a queued trajectory has to go on; None: under any that is not older."""
    return trajectory.columns.version_last if one_version else trajectory.columns.version_open


def queued_view(
    trajectory: Trajectory, birth: int, replicas: Mapping[str, Incarnation], *, one_version: bool
) -> QueuedView:
    """A turn that has no token may begin under any version that is not older than the turn before. With
    `one_version` it has that turn's version. Its home is the replica of its last lease, if that process is
    still there."""
    columns = trajectory.columns
    oldest = birth if columns.version_last is None else columns.version_last
    has_home = columns.version_open is None and (columns.runs or not trajectory.lease)
    last = replicas.get(trajectory.replica) if has_home else None
    is_there = last is not None and last.alive and last.epoch == trajectory.epoch
    bound = bound_to(trajectory, one_version=one_version)
    return QueuedView(bound, oldest, trajectory.replica if is_there else "", len(columns))


def restart(trajectory: Trajectory, *, one_version: bool) -> int:
    """Drop the tokens of the present turn, or with `one_version` of all turns. Returns how many tokens. A
    prompt of its own stays until its episode begins again."""
    columns = trajectory.columns
    num_tokens, kept = len(columns), columns.prompt_end if one_version else columns.turn_start
    trajectory.columns = columns[:kept]
    if in_first_turn(trajectory):
        trajectory.metrics, trajectory.bounds = {}, trajectory.bounds._replace(next=NO_BOUNDS)
    return num_tokens - kept


def begin(trajectory: Trajectory) -> None:
    """Its episode is to begin, or to begin again: it waits for its prompt."""
    trajectory.columns, trajectory.metrics, trajectory.bounds = TokenColumns(), {}, UNBOUNDED
    trajectory.state, trajectory.finish = State.WAITING, None


def end_turn(trajectory: Trajectory, finish: Finish, *, answered: bool) -> None:
    """Generation has ended. `answered`: an environment answers turns. It answers no turn that was cut, except
    where its own request wanted no more tokens."""
    num_tokens = len(trajectory.columns) - trajectory.columns.turn_start
    waits = answered and (finish is Finish.STOP or 0 < num_tokens == bounds_of(trajectory).max_tokens)
    trajectory.state = State.WAITING if waits else State.GENERATED
    trajectory.finish = Finish.TURN if waits else finish


def request(
    trajectory: Trajectory, prompt: array[int], row_digest: str, *, max_sequence_tokens: int
) -> ScoreRequest:
    """What an environment needs to answer the last turn, or to begin."""
    columns, finish = trajectory.columns, trajectory.finish
    turns = columns.turns()[columns.prompt_end > 0 :]
    return ScoreRequest(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group_id,
        tokens=columns.tokens,
        finish=finish or Finish.TURN,
        turns=turns,
        room=max_sequence_tokens - num_seen(columns.forks, len(columns), len(prompt)),
        spent_s=trajectory.metrics.get(ENVIRONMENT_S, 0.0),
        prompt=prompt,
        forks=columns.forks,
        logprobs=columns.logprobs,
        row_digest=row_digest,
        begins=finish is None,
    )


def observe(trajectory: Trajectory, answer: Observed) -> None:
    """The trajectory goes on, with another turn or with its first one."""
    if answer.begins:
        begin(trajectory)
        trajectory.bounds = EpisodeBounds(answer.bounds)
    else:
        trajectory.bounds = EpisodeBounds(trajectory.bounds.first, answer.bounds)
    if answer.after is not None:
        trajectory.columns.fork(answer.after, answer.kept)
    if answer.tokens:
        trajectory.columns.observe(answer.tokens)
    trajectory.state, trajectory.finish = State.QUEUED, None
    if answer.metrics:
        trajectory.metrics = trajectory.metrics | answer.metrics


def end_episode(trajectory: Trajectory, score: Scored) -> None:
    """The trajectory has its reward. Its metrics are those of all turns."""
    trajectory.state, trajectory.reward = State.SCORED, score.value
    trajectory.metrics, trajectory.bounds = trajectory.metrics | score.metrics, UNBOUNDED
    if score.truncated:
        trajectory.finish = Finish.LENGTH
    elif trajectory.finish is Finish.TURN:
        trajectory.finish = Finish.STOP
