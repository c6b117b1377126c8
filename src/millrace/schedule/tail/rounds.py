"""Short and long rounds: which groups make the next batch of a synchronous run, and how many start.

A short round starts r groups more than the batch of B has. The r groups that are not among the first B are
*parked*. Once B groups are parked, they make a long round, of which nothing is left behind.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.schedule.view import View


def long_round(view: View) -> bool:
    """Whether parked groups start now, in place of new ones: those that are parked or have begun again make
    a batch, and no other group is live."""
    alone = view.returned == len(view.groups)
    return alone and view.parked + view.returned >= view.batch_groups


@dataclass(frozen=True, slots=True)
class TailRounds:
    """A batch in a long round, and `redundant` more groups in a short one."""

    redundant: int

    def wanted_groups_max(self, view: View) -> int:
        """Live groups at most."""
        return view.batch_groups + (0 if long_round(view) else self.redundant)

    def describe(self) -> str:
        return f"{self.redundant} groups beyond a batch, and none in a long round of those left behind"
