"""What a request asks of its turn, beyond what the run samples by.

The bounds are metrics of the trajectory until its episode ends. So they are durable with its tokens, and a
turn that is generated again has them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

FIRST, NEXT = "first_turn:", "next_turn:"
"""Begin the names: of the first turn, and of the turn that follows the last observation."""
_MOST, _STOP, _STOP_ID = "max_tokens", "stop:", "stop_id:"


class TurnBounds(NamedTuple):
    """`max_tokens`: most sampled tokens of the turn; 0: the run's. `stop`: strings that end the turn, besides
    those of the run. `stop_ids`: tokens that do."""

    max_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()

    def metrics(self, kind: str) -> dict[str, float]:
        """`kind`: FIRST or NEXT. Empty: there are no bounds."""
        most = {f"{kind}{_MOST}": float(self.max_tokens)} if self.max_tokens else {}
        ids = {f"{kind}{_STOP_ID}{one}": 1.0 for one in self.stop_ids}
        return most | {f"{kind}{_STOP}{one}": 1.0 for one in self.stop} | ids

    @classmethod
    def of(cls, metrics: Mapping[str, float], kind: str) -> TurnBounds:
        """The inverse of `metrics`."""
        names = [name.removeprefix(kind) for name in metrics if name.startswith(kind)]
        if not names:
            return NO_BOUNDS
        stop = sorted(name.removeprefix(_STOP) for name in names if name.startswith(_STOP))
        ids = sorted(int(name.removeprefix(_STOP_ID)) for name in names if name.startswith(_STOP_ID))
        return cls(int(metrics.get(f"{kind}{_MOST}", 0.0)), tuple(stop), tuple(ids))


NO_BOUNDS = TurnBounds()


def is_bound(name: str) -> bool:
    """Whether this metric is a bound of a turn."""
    return name.startswith((FIRST, NEXT))


def measured(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that are no bounds."""
    return {name: value for name, value in metrics.items() if not is_bound(name)}
