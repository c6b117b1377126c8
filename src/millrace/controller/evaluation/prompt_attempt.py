"""One attempt at one prompt of an evaluation: a completion that is scored, or an episode.

An attempt goes through the states of a trajectory, and an environment does to it what it does in training
(`controller.episode`). It is in no group and in no account of training.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from millrace.controller import episode
from millrace.core.completion.marked import marked
from millrace.core.turns.turn_bounds import EpisodeBounds
from millrace.core.types import (
    EvaluationAttempt,
    Finish,
    Observed,
    Progress,
    Prompt,
    Sampling,
    Score,
    Scored,
    ScoreRequest,
    State,
    Trajectory,
    Work,
)
from millrace.estimates.evaluation import Attempt

UNDERWAY_MAX = 2048
"""Attempts that have begun and have no score. A reward worker keeps more episodes (`Episodes`)."""


@dataclass(slots=True)
class PromptAttempt:
    """`attempt` 0 is greedy. `own_prompt`: its episode begins before its first turn, and gives its prompt."""

    index: int
    prompt_index: int
    prompt: Prompt
    attempt: int
    own_prompt: bool = False
    has_begun: bool = False
    trajectory: Trajectory = field(init=False)
    score: Score | None = None

    def __post_init__(self) -> None:
        bounds = EpisodeBounds(self.prompt.bounds)
        self.trajectory = Trajectory(self.index, self.prompt_index, bounds=bounds)

    @property
    def is_queued(self) -> bool:
        """Whether a turn of it is to be generated."""
        return self.trajectory.state is State.QUEUED

    def begin(self) -> None:
        """Its episode is asked for its prompt."""
        self.has_begun = True
        episode.begin(self.trajectory)

    def lease(self, lease: int, sampling: Sampling, seed: int, episode_tokens: int) -> Work:
        self.trajectory.lease, self.trajectory.state, self.has_begun = lease, State.LEASED, True
        if self.attempt == 0:
            sampling = replace(sampling, temperature=0.0)
        return episode.work(self.trajectory, self.prompt.tokens, sampling, seed, episode_tokens)

    def lose_lease(self) -> None:
        """Its engine is gone. The tokens so far stay."""
        if self.trajectory.state is State.LEASED:
            self.trajectory.state = State.QUEUED

    def take(self, progress: Progress, *, answered: bool) -> bool:
        """Append new tokens. Returns whether the turn has ended. Tokens of another lease, or tokens that are
        here already, change nothing. `answered`: an environment answers turns.

        Raises: DataError: a gap."""
        one = self.trajectory
        if progress.lease != one.lease or one.state is not State.LEASED:
            return False
        episode.extend(one, progress, "the evaluator")
        if progress.finish is None:
            return False
        episode.end_turn(one, progress.finish, answered=answered)
        return True

    def score_request(self, score_id: int, max_sequence_tokens: int) -> ScoreRequest:
        prompt = self.prompt
        request = episode.request(
            self.trajectory, prompt.tokens, prompt.row_digest, max_sequence_tokens=max_sequence_tokens
        )
        return replace(request, trajectory_id=score_id, group_id=prompt.group_id)

    def answer(self, answer: Score | Observed) -> None:
        """The attempt has its score, or another turn. One that waits for neither is not changed."""
        if self.trajectory.state not in episode.UNANSWERED:
            return
        if isinstance(answer, Observed):
            return episode.observe(self.trajectory, answer)
        if isinstance(answer, Scored):
            episode.end_episode(self.trajectory, answer)
        else:
            self.trajectory.state = State.FAILED
        self.score = answer

    def result(self) -> Attempt:
        assert self.score is not None, self
        return Attempt(self.score, truncated=self.trajectory.finish is Finish.LENGTH)

    def record(self) -> EvaluationAttempt:
        """An episode that failed before its first turn has no finish of its own."""
        finish, score = self.trajectory.finish or Finish.STOP, self.score
        assert score is not None, self
        scored = score if isinstance(score, Scored) else None
        return EvaluationAttempt(
            self.prompt_index,
            self.prompt.row_id,
            self.attempt,
            marked(self.trajectory.columns),
            finish,
            scored.value if scored else None,
            (scored.answer or "") if scored else "",
            getattr(score, "reason", ""),
        )


def attempts_of(prompts: Sequence[Prompt], samples: int, *, own_prompts: bool) -> list[PromptAttempt]:
    """A greedy attempt at each prompt, and `samples` others."""
    each = 1 + samples
    return [
        PromptAttempt(at * each + attempt, at, prompt, attempt, own_prompts)
        for at, prompt in enumerate(prompts)
        for attempt in range(each)
    ]


def next_turns(attempts: Collection[PromptAttempt], num: int) -> list[PromptAttempt]:
    """At most `num` attempts with a turn to generate, those that have begun first. None begins while
    `UNDERWAY_MAX` are under way."""
    begun = [one for one in attempts if one.has_begun and one.score is None]
    fresh = [one for one in attempts if not (one.has_begun or one.own_prompt)]
    room = max(0, UNDERWAY_MAX - len(begun))
    return [*(one for one in begun if one.is_queued), *fresh[:room]][:num]


def next_begins(attempts: Collection[PromptAttempt], num: int) -> list[PromptAttempt]:
    """Attempts whose episodes are to begin now, so that `num` have no token yet."""
    fresh = [one for one in attempts if one.own_prompt and not one.has_begun]
    begun = (one for one in attempts if one.own_prompt and one.has_begun and one.score is None)
    num_ahead = sum(one.trajectory.columns.version_first is None for one in begun) if fresh else 0
    return fresh[: max(0, num - num_ahead)]
