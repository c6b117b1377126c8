"""What a request asks of its turn, beyond what the run samples by.

The bounds are metrics of the trajectory until its episode ends. So they are durable with its tokens, and a
turn that is generated again has them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

FIRST, NEXT = "first_turn:", "next_turn:"
"""Begin the names: of the first turn, and of the turn that follows the last observation."""
_MOST, _STOP = "max_tokens", "stop:"


class TurnBounds(NamedTuple):
    """`max_tokens`: most sampled tokens of the turn; 0: the run's. `stop`: strings that end the turn, besides
    those of the run."""

    max_tokens: int = 0
    stop: tuple[str, ...] = ()

    def metrics(self, kind: str) -> dict[str, float]:
        """`kind`: FIRST or NEXT. Empty: there are no bounds."""
        most = {f"{kind}{_MOST}": float(self.max_tokens)} if self.max_tokens else {}
        return most | {f"{kind}{_STOP}{one}": 1.0 for one in self.stop}

    @classmethod
    def of(cls, metrics: Mapping[str, float], kind: str) -> TurnBounds:
        """The inverse of `metrics`."""
        begin = f"{kind}{_STOP}"
        stop = sorted(name.removeprefix(begin) for name in metrics if name.startswith(begin))
        return cls(int(metrics.get(f"{kind}{_MOST}", 0.0)), tuple(stop))


NO_BOUNDS = TurnBounds()


def is_bound(name: str) -> bool:
    """Whether this metric is a bound of a turn."""
    return name.startswith((FIRST, NEXT))


def measured(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that are no bounds."""
    return {name: value for name, value in metrics.items() if not is_bound(name)}
