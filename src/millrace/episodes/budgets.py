"""What can end an episode before its environment does."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.config.tables.task import EnvironmentRewardSection
from millrace.core.types import Finish, ScoreRequest

TOKENS, TURNS, CONTEXT = "tokens", "turns", "context"
TOOL_CALLS, SAMPLED, SECONDS = "tool_calls", "sampled", "seconds"


@dataclass(frozen=True)
class Budgets:
    """Named as in the metrics `ended_by_NAME`. None: there is no such budget. Sampled tokens of one turn and
    all tokens always have one, and the form of tools counts calls."""

    turns: int
    tool_calls: int | None = None
    episode_tokens: int | None = None
    episode_s: float | None = None

    @classmethod
    def of(cls, config: EnvironmentRewardSection) -> Budgets:
        return cls(config.turns, config.tool_calls, config.episode_tokens, config.episode_s)

    @property
    def names(self) -> list[str]:
        own = {TOOL_CALLS: self.tool_calls, SAMPLED: self.episode_tokens, SECONDS: self.episode_s}
        return [TOKENS, TURNS, CONTEXT, *(name for name, most in own.items() if most is not None)]

    def used_up(self, request: ScoreRequest, turns: int, seconds: float) -> str:
        """The budget that is used up after a turn was answered; empty: none is."""
        sampled = sum(stop - start for start, stop, is_sampled in request.turns if is_sampled)
        if self.episode_tokens is not None and sampled >= self.episode_tokens:
            return SAMPLED
        if request.finish is Finish.LENGTH:
            return TOKENS
        if turns >= self.turns:
            return TURNS
        return SECONDS if self.episode_s is not None and seconds >= self.episode_s else ""
