"""The accounts of a run: the number of trajectories in each state, and the trajectories that may still move.

    admitted = trained + rejected + stale + abandoned + failed + in_flight

The accounts are kept in memory, and compared with the counts in the file at every flush.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from millrace.core.errors import LedgerError
from millrace.core.types import TERMINAL, Accounting, State
from millrace.ledger.ledger_schema import ADMITTED


class Accounts:
    """Counts by state. `states` has the trajectories that may still move, and those that ended since the last
    `settle`. So its size follows the trajectories in flight, not the length of the run."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self.admitted = counts.get(ADMITTED, 0)
        self.counts: Counter[State] = Counter({state: counts.get(state, 0) for state in State})
        self.states: dict[int, State] = {}

    def admit(self, trajectory_id: int, state: State) -> None:
        if trajectory_id in self.states:
            raise LedgerError(f"trajectory {trajectory_id} is admitted twice\n  Ids must never be reused.")
        self.admitted += 1
        self.counts[state] += 1
        self.states[trajectory_id] = state

    def move(self, trajectory_id: int, state: State) -> None:
        """Move a trajectory into `state`. Raises LedgerError: it has ended already, in another state."""
        before = self.states[trajectory_id]
        if before is state:
            return
        if before in TERMINAL:
            raise LedgerError(
                f"trajectory {trajectory_id} ended as {before} and cannot become {state}\n"
                "  A trajectory has exactly one terminal state."
            )
        self.counts[before] -= 1
        self.counts[state] += 1
        self.states[trajectory_id] = state

    def counts_after_training(self, trajectory_ids: Iterable[int]) -> Counter[State]:
        """The counts after training. This method changes nothing."""
        after = self.counts.copy()
        for trajectory_id in trajectory_ids:
            after[self.states[trajectory_id]] -= 1
            after[State.TRAINED] += 1
        return after

    def settle(self, ended: Iterable[int]) -> None:
        """Forget trajectories whose end is in the file."""
        for trajectory_id in ended:
            self.states.pop(trajectory_id, None)

    def accounting(self) -> Accounting:
        return accounting_of(self.admitted, self.counts)


def accounting_of(admitted: int, counts: Mapping[State, int]) -> Accounting:
    ended = {state.value: counts.get(state, 0) for state in TERMINAL}
    in_flight = sum(count for state, count in counts.items() if state not in TERMINAL)
    return Accounting(admitted=admitted, in_flight=in_flight, **ended)


def refuse_imbalance(
    where: str, admitted: int, counts: Mapping[State, int], recorded: Mapping[str, int]
) -> None:
    """Compare the expected counts with the counts that the file recorded.

    Raises LedgerError, which names every count that differs, or says that the counts do not add up.
    """
    due = {ADMITTED: admitted, **{state.value: counts.get(state, 0) for state in State}}
    wrong = [
        f"{name} is {recorded.get(name, 0)}, not {num}"
        for name, num in due.items()
        if recorded.get(name, 0) != num
    ]
    if not wrong and not accounting_of(admitted, counts).balanced:
        wrong = [f"admitted {admitted} is not the sum of all states {sum(counts.values())}"]
    if wrong:
        raise LedgerError(
            f"ledger {where}: the accounts do not close: {'; '.join(wrong)}\n"
            "  A trajectory was lost or counted twice, here or by another program that wrote to the file. "
            "Nothing of this flush was written; resume from a copy of the run, and report this."
        )
