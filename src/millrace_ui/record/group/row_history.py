"""How a row went over the run: each time that it was drawn, what became of its group."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from millrace.ledger.reading.draws import Draw
from millrace.ledger.reading.reader import LedgerReader

DRAWS_MAX = 50
LOOK_S = 0.4
"""No index has rows: the search goes back from the newest group for about so long."""
_WIDTH = 4000


@dataclass(frozen=True, slots=True)
class RowHistory:
    """`draws`, the newest first, are those of the groups from `first` on. `whole`: these are all."""

    row_id: str
    draws: list[Draw]
    first: int
    whole: bool

    @property
    def rewards(self) -> list[float]:
        """The mean reward of each draw that has one, the oldest first."""
        return [draw.reward_mean for draw in reversed(self.draws) if draw.reward_mean is not None]

    def as_json(self) -> dict[str, Any]:
        return {"looked_back_to_group": self.first, "draws": [asdict(draw) for draw in self.draws]}


def history_of(
    reader: LedgerReader, row_id: str, stop: int | None = None, look_s: float = LOOK_S
) -> RowHistory:
    """The newest draws of the row in groups before `stop`; None: in all groups. Raises LedgerError."""
    draws, until_s = list[Draw](), time.monotonic() + look_s
    first = reader.groups_end() if stop is None else stop
    while first > 0:
        start = max(0, first - _WIDTH)
        draws += reader.draws(row_id, start, first)
        first = start
        if len(draws) >= DRAWS_MAX or time.monotonic() >= until_s:
            break
    if len(draws) > DRAWS_MAX:
        first = draws[DRAWS_MAX - 1].group_id
    return RowHistory(row_id, draws[:DRAWS_MAX], first, whole=stop is None and not first)
