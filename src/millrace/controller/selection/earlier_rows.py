"""Earlier completions of a row, which go along with the works of its next groups: hints for drafts.

A hint changes no token. It has the completions of the highest rewards, because training makes these likely.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable

from msgspec.structs import replace

from millrace.controller.state.run_state import RunState
from millrace.core.protocols import Ledger
from millrace.core.types import StepRecord, Work
from millrace.schedule.tail.lengths import ROWS_MAX

COMPLETIONS = 2
TOKENS_MAX = 1 << 14
"""Tokens of a hint. They take 64 KiB of a message, and a millisecond or two of the controller."""
RESUMED_MAX, HINTED_MAX = 1 << 16, 1 << 14  # groups that a resumed run looks up; hints that are remembered


class EarlierOfRows:
    """The newest trained group of each row; tokens stay in the ledger. Of more than `ROWS_MAX` rows those
    are forgotten that were trained longest ago. Without `rollout.drafts = "earlier"` nothing is kept, and
    works stay as they are."""

    def __init__(self, drafts: str | None, ledger: Ledger) -> None:
        """`drafts`: `rollout.drafts`."""
        self._ledger = ledger if drafts == "earlier" else None
        self._groups: OrderedDict[str, tuple[int, int]] = OrderedDict()  # its version, and its id
        self._hinted: OrderedDict[tuple[str, int, int], None] = OrderedDict()
        if self._ledger is not None:
            steps, num = list[StepRecord](), 0
            for step in reversed(ledger.steps_after(0)):
                num += len(step.group_ids)
                if num <= RESUMED_MAX:
                    steps.append(step)
            self.learn(reversed(steps))

    def learn(self, steps: Iterable[StepRecord]) -> None:
        """Take in committed steps, in order."""
        if self._ledger is not None:
            for step in steps:
                for one in self._ledger.outcomes(step):
                    self._groups[one.row_id] = step.version, one.group_id
                    self._groups.move_to_end(one.row_id)
            while len(self._groups) > ROWS_MAX:
                self._groups.popitem(last=False)

    def hinted(self, works: list[Work], state: RunState, replica: str) -> list[Work]:
        """`works`, of which the first of each group has a hint that `replica` did not get before."""
        if self._ledger is None:
            return works
        epoch = state.replicas[replica].epoch
        return [
            replace(work, earlier=earlier) if (earlier := self._news(work, state, replica, epoch)) else work
            for work in works
        ]

    def figures(self, works: list[Work]) -> dict[str, int]:
        """The field `earlier_tokens` of a `leased` event, where drafts are made of earlier completions."""
        if self._ledger is None:
            return {}
        return {"earlier_tokens": sum(len(tokens) for work in works for tokens in work.earlier)}

    def _news(self, work: Work, state: RunState, replica: str, epoch: int) -> list[array[int]]:
        group = self._groups.get(state.groups[work.group_id].group.row_id)
        hint = replica, epoch, work.group_id
        if group is None or self._ledger is None or hint in self._hinted:
            return []
        self._hinted[hint] = None
        if len(self._hinted) > HINTED_MAX:
            self._hinted.popitem(last=False)
        tokens = self._ledger.completions(*group, COMPLETIONS)
        room = TOKENS_MAX // max(1, len(tokens))
        return [completion[:room] for completion in tokens]
