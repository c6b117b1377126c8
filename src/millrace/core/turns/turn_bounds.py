"""What a request asks of its turn, beyond what the run samples by.

The bounds are durable with the trajectory's tokens. So a turn that is generated again has them again.
"""

from __future__ import annotations

from typing import NamedTuple


class TurnBounds(NamedTuple):
    """`max_tokens`: most sampled tokens of the turn; 0: the run's. `stop`: strings that end the turn, besides
    those of the run. `stop_ids`: tokens that do."""

    max_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()


NO_BOUNDS = TurnBounds()


class EpisodeBounds(NamedTuple):
    """`first`: of the first turn, for an episode that begins again. `next`: of the turn that follows the last
    observation."""

    first: TurnBounds = NO_BOUNDS
    next: TurnBounds = NO_BOUNDS


UNBOUNDED = EpisodeBounds()


ENVIRONMENT_S = "environment_s"
"""Of an episode with a budget of seconds: those that its environment took until now."""
